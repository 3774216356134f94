"""Plans AlexNet, ResNet-50 and the GPT example from a profile, and runs what was planned.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--ranks 2,4] [--case gpt] [--steps 9] [--json FILE]

On each number of ranks the model is profiled under a plain cut, planned, built anew by the plan and
trained, the optimizer's step left out. Printed are the time of a batch, and the processor time and
the most bytes of each rank, as predicted and as measured, and measured / predicted. The first steps
are cold and do not count. Ranks that share a processor take longer than predicted: there look at
the processor time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from dygraph_alexnet import AlexNetPipe
from gpt import gpt
from resnet import ResNet

import fleetpipe
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import PipelineLayer

MICRO_BATCHES, COLD = 8, 2

#: ``build(plan)`` makes a pipeline; None means a plain cut.
Build = Callable[[Any], Any]


def images(rows: int, channels: int, size: int) -> list[Any]:
    """[images, labels] of a batch."""
    numbers = np.random.default_rng(0)
    shape = (MICRO_BATCHES * rows, channels, size, size)
    labels = numbers.integers(0, 10, (MICRO_BATCHES * rows, 1))
    return [paddle.to_tensor(numbers.standard_normal(shape, "float32")), paddle.to_tensor(labels)]


def of_list(first: Callable[[], Any]) -> Build:
    """Builds a list of layers, that of a ``PipelineLayer``."""

    def build(plan: Any) -> Any:
        plain = first()
        if plan is None:
            return plain
        topology = fleet.get_hybrid_communicate_group().topology()
        return PipelineLayer(plain.layers, topology=topology, loss_fn=plain.loss_fn(), plan=plan)

    return build


def topology() -> Any:
    """Returns the job's topology."""
    return fleet.get_hybrid_communicate_group().topology()


def alexnet(rows: int) -> tuple[Build, list[Any]]:
    """AlexNet for 28 x 28 digits."""
    return of_list(lambda: AlexNetPipe(topology=topology())), images(rows, 1, 28)


def resnet(rows: int) -> tuple[Build, list[Any]]:
    """ResNet-50 of a quarter of the width, captured."""
    data = images(rows, 3, 32)

    def build(plan: Any) -> Any:
        return fleetpipe.pipeline(
            ResNet(50, width=16),
            (data[0][:rows],),
            loss_fn=nn.CrossEntropyLoss(),
            split_spec="auto" if plan is None else plan,
            verify=False,
        )

    return build, data


def gpt_example(rows: int) -> tuple[Build, list[Any]]:
    """The example's GPT, a little larger."""
    shape = argparse.Namespace(width=128, heads=4, dropout=0.0, length=128, blocks=8)
    tokens = np.random.default_rng(0).integers(0, 256, (MICRO_BATCHES * rows, shape.length + 1))
    data = [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]
    return of_list(lambda: gpt(shape, 256, topology=topology())), data


CASES = {"alexnet": (alexnet, 16), "resnet50": (resnet, 4), "gpt": (gpt_example, 4)}


def begin(ranks: int, rows: int) -> None:
    """Begins a job."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": ranks}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": rows}
    fleet.init(is_collective=True, strategy=strategy)


def measure(name: str, ranks: int, steps: int, result: Path) -> None:
    """What each rank does; rank 0 writes the result."""
    case, rows = CASES[name]
    begin(ranks, rows)
    build, data = case(rows)
    model = fleet.distributed_model(build(None))
    for _ in range(COLD):
        model.forward_backward_pipeline(data)
    plan = fleetpipe.plan(model.profile(data), ranks, MICRO_BATCHES, optimizer_copies=0)
    del model
    gc.collect()
    before = core.host_memory_stat_current_value("Allocated", 0)
    model = fleet.distributed_model(build(plan))
    seconds, computed = [], []
    for step in range(COLD + steps):
        if step == COLD:
            core.host_memory_stat_reset_peak_value("Allocated", 0)
        start, begun = time.perf_counter(), time.process_time()
        model.forward_backward_pipeline(data)
        seconds.append(time.perf_counter() - start)
        computed.append(time.process_time() - begun)
    peak = core.host_memory_stat_peak_value("Allocated", 0) - before
    everyone: list[Any] = []
    paddle.distributed.all_gather_object(
        everyone, (seconds[COLD:], statistics.median(computed[COLD:]), peak)
    )
    rank = fleet.get_hybrid_communicate_group().get_stage_id()
    fleet.shutdown()
    if rank == 0:
        # A batch takes as long as its slowest rank.
        slowest = [max(times) for times in zip(*(found for found, _, _ in everyone))]
        found = {
            "case": name,
            "ranks": ranks,
            "schedule": f"{plan.schedule.name}, v = {plan.chunks}",
            "predicted seconds": plan.predicted.time,
            "seconds": statistics.median(slowest),
            "predicted bytes": plan.predicted.peak_bytes,
            "bytes": [size for _, _, size in everyone],
            "predicted busy": plan.predicted.busy,
            "busy": [used for _, used, _ in everyone],
        }
        result.write_text(json.dumps(found))


def show(found: dict[str, Any]) -> None:
    """Prints a case."""
    predicted, measured = found["predicted seconds"], found["seconds"]
    print(
        f"{found['case']:<9} {found['ranks']} ranks  {found['schedule']:<22}"
        f" {1e3 * predicted:8.1f} ms predicted {1e3 * measured:8.1f} ms measured"
        f"  {measured / predicted:6.3f}"
    )
    times = zip(found["predicted busy"], found["busy"])
    for rank, (predicted, measured) in enumerate(times):
        print(
            f"{'':<9} rank {rank} {'':<23} {1e3 * predicted:8.1f} ms predicted"
            f" {1e3 * measured:8.1f} ms of processor  {measured / predicted:6.3f}"
        )
    for rank, (predicted, measured) in enumerate(zip(found["predicted bytes"], found["bytes"])):
        print(
            f"{'':<9} rank {rank} {'':<23} {predicted / 2**20:8.2f} MiB predicted"
            f" {measured / 2**20:7.2f} MiB measured  {measured / predicted:6.3f}"
        )


def main() -> int:
    """Launches the ranks of each case, and shows what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--case", choices=CASES, help="one of the models alone")
    parser.add_argument("--steps", type=int, default=9, help="steps that are measured")
    parser.add_argument("--json", type=Path, help="write the figures")
    arguments = parser.parse_args()
    if "PADDLE_TRAINER_ID" in os.environ:
        measure(arguments.case, int(arguments.ranks), arguments.steps, arguments.json)
        return 0
    found = []
    for ranks in arguments.ranks.split(","):
        for name in [arguments.case] if arguments.case else CASES:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result.json"
                command = [sys.executable, "-m", "paddle.distributed.launch"]
                command += ["--nproc_per_node", ranks, "--log_dir", folder, __file__]
                command += ["--ranks", ranks, "--case", name, "--json", str(result)]
                command += ["--steps", str(arguments.steps)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
                    return 1
                found.append(json.loads(result.read_text()))
            show(found[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes the picture of README anew: a real step on four ranks under 1F1B, and one under ZBV.

    .venv/bin/python .ci/timeline.py

So that four ranks need no four cores, each layer waits 20 ms in a forward, and 20 ms for each part
of its backward, in the place of a device's work. Ranks, transfers and order are those of any job.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "assets" / "timeline.png"
RANKS, MICRO_BATCHES, LAYERS, STEPS = 4, 8, 8, 4
SECONDS = 0.02
COLOURS = 64


def train(schedule: str, folder: str) -> None:
    """Trains as one of four ranks, with a trace."""
    import paddle
    from paddle.autograd import PyLayer

    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer

    class Wait(PyLayer):
        """Hands a value on, and waits before its gradient, in a forward too if that is asked."""

        @staticmethod
        def forward(ctx: Any, value: Any, seconds: float) -> Any:
            time.sleep(seconds)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(SECONDS)
            return grad

    class Slow(paddle.nn.Layer):
        """A layer of which forward, input gradient and weight gradient take as long."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([8, 8])

        def forward(self, value: Any) -> Any:
            return Wait.apply(value, SECONDS) @ Wait.apply(self.weight, 0.0)

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": RANKS}
    strategy.pipeline_configs = {
        "accumulate_steps": MICRO_BATCHES,
        "micro_batch_size": 2,
        "schedule_mode": schedule,
    }
    strategy.fleetpipe_configs = {"trace": folder}
    fleet.init(is_collective=True, strategy=strategy)
    layers = [LayerDesc(Slow) for _ in range(LAYERS)]
    chunks = 2 if schedule == "ZBV" else 1
    pipe = PipelineLayer(
        layers,
        num_stages=RANKS,
        num_virtual_pipeline_stages=chunks,
        loss_fn=paddle.nn.functional.mse_loss,
    )
    model = fleet.distributed_model(pipe)
    sgd = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(sgd)
    paddle.seed(0)
    for _ in range(STEPS):
        inputs, labels = paddle.randn([2, 2 * MICRO_BATCHES, 8])
        model.train_batch([inputs, labels], optimizer)
    fleet.shutdown()


def measured(schedule: str, folder: Path) -> Any:
    """Runs a job, and returns the panel of its shortest step."""
    from fleetpipe.schedules import build
    from fleetpipe.schedules.forms import Event, Panel, figures_of

    command = [sys.executable, "-m", "fleetpipe", "run", "--nproc", str(RANKS)]
    command += ["--log-dir", str(folder / "log"), __file__, schedule, str(folder)]
    subprocess.run(command, check=True, timeout=300)
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    ranks = {
        event["pid"]: int(event["args"]["name"].split()[1])
        for event in trace
        if event["name"] == "process_name" and "measured" in event["args"]["name"]
    }
    events = [
        Event(ranks[one["pid"]], one["name"], one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6)
        for one in trace
        if one["ph"] == "X" and one["pid"] in ranks
    ]
    events = sorted((one for one in events if one.actions), key=lambda one: one.start)
    count = len(events) // STEPS
    steps = [events[number : number + count] for number in range(0, len(events), count)]
    step = min(steps, key=lambda one: one[-1].end - one[0].start)
    begun = step[0].start
    title = f"{schedule}: {figures_of(step).bubble_rate:.0%} of the time of the ranks is idle"
    step = [one._replace(start=one.start - begun, end=one.end - begun) for one in step]
    chunks = 2 if schedule == "ZBV" else 1
    size = {"ranks": RANKS, "micro_batches": MICRO_BATCHES, "chunks": chunks}
    placement = build(schedule, **size).placement
    return Panel(title, step, placement, "s")


def main() -> None:
    """Runs both jobs and draws them on one scale, in few colours."""
    from PIL import Image

    from fleetpipe.schedules.forms import draw

    with tempfile.TemporaryDirectory() as folder:
        panels = []
        for schedule in ("1F1B", "ZBV"):
            (home := Path(folder) / schedule).mkdir()
            panels.append(measured(schedule, home))
        draw(panels, TARGET, size=(12, 4.6), dpi=90)
    image = Image.open(TARGET).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(TARGET, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(*sys.argv[1:])
    else:
        main()

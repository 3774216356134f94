"""Makes the picture of README anew: a real step on four ranks under 1F1B, and one under ZBV.

    .venv/bin/python .ci/timeline.py

So that four ranks need no four cores, an action waits for each of its layers in the place of a
device's work: 20 ms in a forward, and as long in each half of a backward. All else is as in a job.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "assets" / "timeline.png"
RANKS, MICRO_BATCHES, LAYERS, STEPS = 4, 8, 8, 4
SECONDS = 0.02
COLOURS = 64
#: Both cut the same layers.
CHUNKS = {"1F1B": 1, "ZBV": 2}


def slowed(action: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Returns an action of a stage that takes so much longer."""

    @functools.wraps(action)
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return action(*arguments)

    return slow


def train(schedule: str, folder: str) -> None:
    """Trains as one of four ranks, with a trace."""
    import paddle

    from fleetpipe import fleet
    from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
    from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer

    chunks = CHUNKS[schedule]
    unit = SECONDS * LAYERS / RANKS / chunks
    # Under ZBV every backward is split: its first half is a backward that leaves W out.
    for name, units in (("forward", 1), ("backward", 3 - chunks), ("weight_grad", 1)):
        setattr(DygraphStage, name, slowed(getattr(DygraphStage, name), units * unit))
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": RANKS}
    strategy.pipeline_configs = {
        "accumulate_steps": MICRO_BATCHES,
        "micro_batch_size": 2,
        "schedule_mode": schedule,
    }
    strategy.fleetpipe_configs = {"trace": folder}
    fleet.init(is_collective=True, strategy=strategy)
    layers = [LayerDesc(paddle.nn.Linear, 8, 8) for _ in range(LAYERS)]
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
    title = f"{schedule}: bubble {figures_of(step).bubble_rate:.0%}"
    step = [one._replace(start=one.start - begun, end=one.end - begun) for one in step]
    size = {"ranks": RANKS, "micro_batches": MICRO_BATCHES, "chunks": CHUNKS[schedule]}
    placement = build(schedule, **size).placement
    return Panel(title, step, placement, "s")


def main() -> None:
    """Runs both jobs and draws them on one scale, in few colours."""
    from PIL import Image

    from fleetpipe.schedules.forms import draw

    with tempfile.TemporaryDirectory() as folder:
        panels = []
        for schedule in CHUNKS:
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

"""Trains a static program while ranks die: ``program_worker.py STEPS [RANK.STEP=PLACE ..]``.

Places are those of ``healing_worker.py``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle

import fleetpipe
from fleetpipe import fleet
from fleetpipe.contrib.kept_state import Segment
from fleetpipe.job.job import current_job
from fleetpipe.static import state_dict
from tests.contrib.healing.healing_worker import Deaths, dying
from tests.static.networks import MICRO_BATCHES, batches, executor_of, mlp, strategy_of


def micro_batches(feed: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """A mini-batch as an iterator."""
    parts = {name: np.split(array, MICRO_BATCHES) for name, array in feed.items()}
    return (dict(zip(parts, part)) for part in zip(*parts.values()))


def train(steps: int, folder: str, tell: Callable[[str], object]) -> None:
    """Trains, and tells what was fetched, and the state at the end."""
    paddle.seed(7)
    fleet.init(is_collective=True)
    # Each stage draws, and no step seeds: the generator of stage 0 alone goes on by itself.
    loss, logits = mlp(2, dropout=(0, 1), norm=True)()
    main = paddle.static.default_main_program()
    rate = paddle.optimizer.lr.ExponentialDecay(0.01, 0.9)
    adam = paddle.optimizer.Adam(rate)
    exe = executor_of(loss, strategy_of(fetch_broadcast=True, timeout=30), adam)
    manager = fleetpipe.CheckpointManager(folder, save_interval=100)
    run = fleetpipe.resume(main, adam, lr_scheduler=rate, manager=manager)
    feed = {name: array.copy() for name, array in batches(1)[0].items()}
    for step in run.steps(steps):
        Deaths.step = step
        Deaths.come("before")
        for name, rows in batches(step + 1)[step].items():
            feed[name][...] = rows  # a script may use its arrays again
        # Another fetch builds the program's pieces anew.
        fetches = [loss, logits] if step % 4 == 3 else [loss]
        fed = micro_batches(feed) if step % 2 else feed
        fetched = exe.run(main, feed=fed, fetch_list=fetches)
        Deaths.come("after")
        rate.step()
        tell(f"step {step} " + " ".join(one.tobytes().hex() for one in fetched))
    job = current_job()
    assert job is not None
    job.require_agreement({"the end": str(steps)})
    for name, value in state_dict().items():
        tell(f"bits {name} {value.tobytes().hex()}")
    fleet.shutdown()


def main() -> None:
    from fleetpipe.static.run.compiled_pipeline import Compiled
    from fleetpipe.static.run.static_stage import StaticStage

    steps, *words = sys.argv[1:]
    Deaths.wanted = {*words}
    Segment._mark_slot = dying(Segment._mark_slot, "kept")  # type: ignore[method-assign]
    forward, update = StaticStage.forward, Compiled.step

    def last_forward(stage: StaticStage, number: int, micro_batch: int, inputs: Any) -> Any:
        # By the last one the other rank has added gradients up.
        if micro_batch == MICRO_BATCHES - 1:
            Deaths.come("forward")
        return forward(stage, number, micro_batch, inputs)

    def step(compiled: Compiled) -> None:
        update(compiled)
        Deaths.come("update")

    StaticStage.forward = last_forward  # type: ignore[method-assign]
    Compiled.step = step  # type: ignore[method-assign]
    paddle.enable_static()
    train(int(steps), "shared", functools.partial(print, flush=True))


if __name__ == "__main__":
    main()

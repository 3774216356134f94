"""A rank that is killed while the ranks save: what is there is whole, and the others hear of it."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

import fleetpipe
from tests import byhand
from tests.checkpoint.test_saving import fill
from tests.launching import ROOT
from tests.pipelines import job, pipeline

pytestmark = pytest.mark.once

LIMIT = 30.0

#: Restores the newest step, whole or not at all, and then saves again and again. It kills itself as
#: it does something to the disk for the time that it is told, if it is told one.
SAVING = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import paddle, fleetpipe
from fleetpipe import fleet
from tests.checkpoint.test_saving import fill
from tests.pipelines import batch, job, pipeline

home, in_background, victim, moment = sys.argv[1], *map(int, sys.argv[2:])
rank = int(os.environ["PADDLE_TRAINER_ID"])
passed = 0

def counted(act):
    def acting(*args, **named):
        global passed
        passed += 1
        if passed == moment and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **named)
    return acting

with job(2, timeout={LIMIT}):
    model = pipeline()
    adam = paddle.optimizer.Adam(parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(adam)
    model.train_batch(batch(), optimizer)
    moments = [t for kind in adam._accumulators.values() for t in kind.values()]
    manager = fleetpipe.CheckpointManager(home, async_save=bool(in_background), max_to_keep=2)
    step = 0
    if manager.steps():
        step = manager.restore(model=model, optimizer=optimizer).step
        values = {{x for t in [*model.parameters(), *moments] for x in t.flatten().tolist()}}
        assert values == {{float(step)}}, (step, values)
    elif moment:
        sys.exit("there is no step to begin with")
    else:
        fill(model, 0.0)
        for tensor in moments:
            tensor.set_value(paddle.zeros_like(tensor))
        manager.save(step, model=model, optimizer=optimizer)
        manager.wait()
    if moment:
        for name in ("pwrite", "fsync", "rename", "open", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
    Path(f"begun.{{rank}}").write_text(f"{{time.monotonic()}}\\n")
    while True:
        step += 1
        fill(model, float(step))
        for tensor in moments:
            tensor.set_value(paddle.full(tensor.shape, float(step)))
        manager.save(step, model=model, optimizer=optimizer)
"""


def kill(folder: Path, home: Path, in_background: bool, victim: int, moment: int) -> int:
    """Kills a rank at some moment, or (0) at some time; returns the newest step that is there."""
    with byhand.started(
        SAVING, 2, str(home), str(int(in_background)), str(victim), str(moment), folder=folder
    ) as ranks:
        for rank in range(2):
            ranks.wait_for(f"begun.{rank}")
        if not moment:
            time.sleep(random.SystemRandom().uniform(0.0, 0.3))
            ranks.signal(victim, signal.SIGKILL)
        ended = ranks.wait(limit=LIMIT + 15)
    assert ended[victim].code == -signal.SIGKILL, ended[victim].log
    survivor = ended[1 - victim]
    assert survivor.code not in (0, -signal.SIGKILL), survivor.log
    assert survivor.at - ended[victim].at < LIMIT
    error = survivor.log[survivor.log.rindex("Traceback") :]
    assert "PeerFailed" in error, survivor.log
    assert re.search(rf"rank {victim}\b", error), survivor.log
    return fleetpipe.CheckpointManager(home).steps()[-1]


def value_of(home: Path) -> set[float]:
    """What the tensors of the newest step are, in one process."""
    with job(1):
        model = pipeline()
        fill(model, -1.0)
        fleetpipe.CheckpointManager(home).restore(model=model)
        return {x for p in model.parameters() for x in p.flatten().tolist()}


def test_a_killed_rank_leaves_a_whole_step_and_an_error_of_its_name(tmp_path: Path) -> None:
    home, last = tmp_path / "run", 0
    # At some time; as rank 0 writes in the background; as rank 1 ends its part.
    for victim, moment, in_background in [(1, 0, False), (0, 3, True), (1, 9, False)]:
        step = kill(tmp_path, home, in_background, victim, moment)
        assert step >= last
        assert value_of(home) == {float(step)}
        last = step

"""Who is killed while it saves leaves every file old, or new, and the other ranks hear of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import fleetpipe
from tests import byhand
from tests.checkpoint.test_saving import fill
from tests.launching import ROOT, Finished
from tests.pipelines import job, pipeline

pytestmark = pytest.mark.once

LIMIT = 30.0

#: Restores the newest step, whole or not at all, and then saves again and again. The victim kills
#: itself as it does something to the disk for the time that it is told.
SAVING = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
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
    else:
        fill(model, 0.0)
        for tensor in moments:
            tensor.set_value(paddle.zeros_like(tensor))
        manager.save(step, model=model, optimizer=optimizer)
        manager.wait()
    for name in ("pwrite", "fsync", "rename", "open", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    while True:
        step += 1
        fill(model, float(step))
        for tensor in moments:
            tensor.set_value(paddle.full(tensor.shape, float(step)))
        manager.save(step, model=model, optimizer=optimizer)
"""


def kill(folder: Path, home: Path, in_background: bool, victim: int, moment: int) -> int:
    """Kills a rank at some moment; returns the newest step that is there."""
    words = map(str, (home, int(in_background), victim, moment))
    with byhand.started(SAVING, 2, *words, folder=folder) as ranks:
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
    # As rank 1 ends its part; as rank 0 writes in the background.
    for victim, moment, in_background in [(1, 9, False), (0, 3, True)]:
        step = kill(tmp_path, home, in_background, victim, moment)
        assert step >= last
        assert value_of(home) == {float(step)}
        last = step


#: Runs ``save(value)`` in children, each killed one moment later than the one before it, at each
#: file that is written, synced or renamed; then ``found()`` is what can be loaded.
KILLS = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
import paddle
from fleetpipe import fleet_files
from fleetpipe.fleet_files import states

folder = sys.argv[1]
most_drafts = 1
moments = [(os, "fsync"), (os, "replace"), (os, "rename"), (states, "_write")]

def killed_at(moment, save):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    passed = 0
    def counted(act):
        def acting(*args, **named):
            nonlocal passed
            passed += 1
            if passed == moment and act is write:
                act(*args, **named)
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **named)
        return acting
    write = states._write
    for module, name in moments:
        setattr(module, name, counted(getattr(module, name)))
    save()
    os._exit(0)

def run(save, found):
    save(0.0)
    assert found() == {{0.0}}
    moment, seen = 1, []
    while killed_at(moment, lambda: save(float(moment))):
        left = [name for name in os.listdir(folder) if name.startswith(".draft")]
        seen.append((found(), len(left)))
        assert seen[-1][0] <= {{0.0, *map(float, range(1, moment + 1))}}
        moment += 1
    assert found() == {{float(moment)}}, found()
    assert not [name for name in os.listdir(folder) if name.startswith(".draft")]
    assert 1 in {{left for _, left in seen}} <= {{*range(most_drafts + 1)}}
    print("kills:", moment - 1, "old:", sum(one == {{0.0}} for one, _ in seen))
"""

CHECKPOINT = f"""{KILLS}
import fleetpipe
from fleetpipe.checkpoint.files import tensors
from paddle import nn

in_background = sys.argv[2] == "background"
most_drafts = 2  # that of the step, and of one that it removes
moments += [(os, "unlink"), (os, "rmdir"), (tensors, "write_at")]
model = nn.Linear(4, 4)
adam = paddle.optimizer.Adam(parameters=model.parameters())
for parameter in model.parameters():
    parameter.grad = parameter * 0
adam.step()
state = [*model.parameters(), *(t for ts in adam._accumulators.values() for t in ts.values())]

def fill(value):
    for tensor in state:
        tensor.set_value(paddle.full(tensor.shape, value))

def save(value):
    fill(value)
    with fleetpipe.CheckpointManager(folder, max_to_keep=2, async_save=in_background) as manager:
        # The same step again, too: what replaces it must not take it away first.
        manager.save(int(value) if in_background else 7, model=model, optimizer=adam)

def found():
    fill(-1.0)
    fleetpipe.CheckpointManager(folder).restore(model=model, optimizer=adam)
    values = {{number for tensor in state for number in tensor.flatten().tolist()}}
    assert len(values) == 1, values
    return values

run(save, found)
"""

DYGRAPH = f"""{KILLS}
import fleetpipe
from fleetpipe import fleet
from tests.pipelines import job, pipeline

def captured():
    net = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4))
    pipe = fleetpipe.pipeline(net, paddle.ones([2, 4]), split_spec=["1"], verify=False)
    return fleet.distributed_model(pipe)

with job(2):
    model = captured() if sys.argv[2] == "captured" else pipeline()

    def fill(value):
        for parameter in model.parameters():
            parameter.set_value(paddle.full(parameter.shape, value))

    def save(value):
        fill(value)
        model.layers.save_state_dict(folder)

    def found():
        fill(-1.0)
        model.layers.set_state_dir(folder)
        values = {{number for p in model.parameters() for number in p.flatten().tolist()}}
        assert len(values) == 1, values
        return values - {{-1.0}}

    run(save, found)
    assert not os.path.exists(os.path.join(folder, "replaced"))
"""

STATIC = f"""{KILLS}
from fleetpipe.static import load_state_dict, state_dict
from tests.static.networks import static_mode
from tests.static.save.test_state import started

with static_mode():
    exe, _ = started()
    main = paddle.static.default_main_program()

    def fill(value):
        load_state_dict({{name: np.full_like(a, value) for name, a in state_dict().items()}})

    def save(value):
        fill(value)
        paddle.static.save(main, os.path.join(folder, "net"))

    def found():
        fill(-1.0)
        paddle.static.load(main, os.path.join(folder, "net"), exe)
        return {{number for array in state_dict().values() for number in array.ravel().tolist()}}

    run(save, found)
"""


@pytest.mark.parametrize("model", ["list", "captured"])
def test_layer_files_are_of_one_save_after_a_kill(
    model: str, launch: Callable[..., Finished], tmp_path: Path
) -> None:
    words = launch(DYGRAPH, None, args=[str(tmp_path), model]).logs[0].split("kills: ")[1].split()
    # Until the manifest is renamed every file is old.
    assert int(words[2]) > int(words[0]) / 2


@pytest.mark.parametrize("how", ["at once", "background"])
def test_a_kill_at_any_moment_leaves_a_whole_step(
    how: str, launch: Callable[..., Finished], tmp_path: Path
) -> None:
    words = launch(CHECKPOINT, None, args=[str(tmp_path), how]).logs[0].split("kills: ")[1].split()
    assert int(words[0]) > 15


def test_files_of_a_program_are_whole_after_a_kill(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    words = launch(STATIC, None, args=[str(tmp_path)]).logs[0].split("kills: ")[1].split()
    assert int(words[2]) > int(words[0]) / 2

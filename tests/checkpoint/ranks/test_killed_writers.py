"""Whoever is killed while it saves under one of Fleet's names leaves every file old, or new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import ROOT, Finished

pytestmark = pytest.mark.once

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
    assert {{left for _, left in seen}} == {{0, 1}} or {{left for _, left in seen}} == {{1}}
    print("kills:", moment - 1, "old:", sum(one == {{0.0}} for one, _ in seen))
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


def test_files_of_a_program_are_whole_after_a_kill(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    words = launch(STATIC, None, args=[str(tmp_path)]).logs[0].split("kills: ")[1].split()
    assert int(words[2]) > int(words[0]) / 2

"""Files that an earlier version wrote are still read, with the values that stand in them.

Two linear layers on two ranks in one process, trained for one step: its profile, a plan of it, its
checkpoint, its files of Fleet's form, a trace of the step, and the folder of a run of
``fleetpipe.Model``, which ``tests/contrib/view`` reads.
"""

from __future__ import annotations

from pathlib import Path

import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet, fleet_files
from fleetpipe.checkpoint.files import manifest
from fleetpipe.checkpoint.files.manifest import hash_of
from fleetpipe.checkpoint.hash_command import digests_in
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.profiling import PipelinePlan, Profile
from fleetpipe.schedules import Costs
from tests.pipelines import bits, job, pipeline

FOLDER = Path(__file__).parent


def two_layers() -> list[LayerDesc]:
    return [LayerDesc(nn.Linear, 2, 3), LayerDesc(nn.Linear, 3, 2)]


def test_a_profile() -> None:
    profile = Profile.read(FOLDER / "profile.json")
    assert [layer.name for layer in profile.layers] == ["Linear", "Linear"]
    assert [layer.parameters for layer in profile.layers] == [36, 32]
    assert profile.boundaries == (0, 1, 2)
    assert profile.splits
    costs = Costs.from_json((FOLDER / "profile.json").read_text())
    assert costs.bytes == (24, 60)


def test_a_plan() -> None:
    plan = PipelinePlan.read(FOLDER / "plan.json")
    assert (plan.ranks, plan.micro_batches, plan.memory_cap) == (2, 3, 2**20)
    assert plan.partition.boundaries == (0, 1, 2)
    assert [stage.parameters for stage in plan.stages] == [36, 32]


def test_a_checkpoint_and_files_of_fleets_form_have_the_same_values() -> None:
    expected = list(bits(fleet_files.load(FOLDER / "model.pdparams")).values())
    with job(2, micro_batches=2):
        model = pipeline(two_layers(), loss_fn=nn.MSELoss())
        model.layers.set_state_dir(FOLDER / "layers")
        assert list(bits(model.layers.state_dict()).values()) == expected
        model = pipeline(two_layers(), loss_fn=nn.MSELoss())
        momentum = paddle.optimizer.Momentum(0.5, parameters=model.parameters())
        optimizer = fleet.distributed_optimizer(momentum)
        manager = fleetpipe.CheckpointManager(FOLDER / "checkpoint")
        restored = manager.restore(model=model, optimizer=optimizer)
        assert restored is not None
        assert restored.step == 2
        assert list(bits(model.layers.state_dict()).values()) == expected
        assert momentum.get_lr() == 0.1
    # Whose manifest has no hash yet.
    hashes = [hash_of(digests_in(FOLDER / name)) for name in ("checkpoint", "layers")]
    assert hashes == [fleetpipe.model_hash(model.layers)] * 2
    assert manifest.read_manifest(FOLDER / "checkpoint/step-00000002").model_hash == ""
    kept = fleet_files.load(FOLDER / "model.pdopt")
    velocities = [value for name, value in kept.items() if "velocity" in name]
    assert [tuple(value.shape) for value in velocities] == [(2, 3), (3,), (3, 2), (2,)]

"""Ranks that hold slices, shards, replicas and tied weights, and one process, read each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import paddle
import pytest

import fleetpipe
from fleetpipe.checkpoint.formats.convert import convert
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import StateError
from fleetpipe.static import state_dict
from tests.checkpoint.ranks.ranks_worker import FORMS, LAYOUTS, contents, load, read, write
from tests.checkpoint.ranks.replicas_worker import everything, of_model, statistics
from tests.checkpoint.test_static import AFTER, Dynamic, Static
from tests.fixtures import Call, Patch
from tests.jobs import job
from tests.static.networks import static_mode

OF_TWO = [name for name in LAYOUTS if name != "alone"]
#: Layouts in which all sums have the same order; the others agree to rounding.
SAME_ORDER = {"alone", "pp", "zbv"}


def test_each_layout_reads_each(on_ranks: Call, tmp_path: Path) -> None:
    written, *_ = on_ranks(write, 2, tmp_path, OF_TWO)
    losses = {**written, **write(tmp_path, ["alone"])}
    first, second = on_ranks(read, 2, tmp_path, OF_TWO)
    assert first == second
    found = {**first, **read(tmp_path, ["alone"])}
    assert found.keys() == {f"{one} from {other}" for one in LAYOUTS for other in LAYOUTS}
    for pair, (same_files, loss) in found.items():
        reader, writer = pair.split(" from ")
        assert same_files, pair
        if {reader, writer} <= SAME_ORDER or reader == writer:
            assert loss == losses[writer], pair
        else:
            assert abs(loss - losses[writer]) < 1e-5, pair


@pytest.mark.skipif(paddle.__version__ < "3", reason="Paddle 2.6.2 writes no flex checkpoint")
def test_other_formats_are_loaded_as_they_are(on_ranks: Call, tmp_path: Path) -> None:
    write(tmp_path, ["alone"])
    (tmp_path / "run").symlink_to(tmp_path / "alone")
    for form in FORMS[:-1]:
        convert(tmp_path / "alone", tmp_path / form, to=form)
    whole = sum(len(file) for file in contents(tmp_path / "alone").values())
    shutil.copytree(tmp_path / "formers", tmp_path / "cut short")
    (tmp_path / "cut short/optimizer_state/0_0.distcp").unlink()
    loaded = {"pp 1": [load(tmp_path, {"pp": 1})], "pp 2": [load(tmp_path, {"pp": 2})]}
    loaded["pp 2 x mp 2"] = on_ranks(load, 4, tmp_path, {"pp": 2, "mp": 2})
    for layout, ranks in loaded.items():
        for *results, refusal in ranks:
            assert [result[:2] for result in results] == [(True, 2)] * len(FORMS), layout
            assert "optimizer_state/0_0.distcp" in refusal
            if len(ranks) == 4:
                assert max(result[2] for result in results) < 0.5 * whole


def test_launched_processes_need_a_job_first(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(StateError, match="do not know each other yet"):
        Ranks.of_job()


def test_each_replica_goes_on_with_its_own_statistics(on_ranks: Call, tmp_path: Path) -> None:
    first, second = on_ranks(everything, 2, tmp_path)
    for graph in ("dynamic", "static"):
        (mine, same), (theirs, same_there) = (one["replicas"][graph] for one in (first, second))
        assert same, graph
        assert same_there, graph
        assert mine.keys() == theirs.keys()
        assert all(mine[name] != theirs[name] for name in mine), "no test of anything"
    # One process that is no replica takes the first one's.
    with job():
        run = Dynamic()
        fleetpipe.CheckpointManager(tmp_path / "dynamic").restore(**run.objects)
        assert statistics(of_model(run)) == first["replicas"]["dynamic"][0]
    # What two ranks drew for their stages one process draws for both.
    with static_mode():
        other = Static(seed=9, dropout=[0, 1])
        fleetpipe.CheckpointManager(tmp_path / "stages").restore(**other.objects)
        other.train(AFTER)
        state = {name: array.tobytes() for name, array in state_dict().items()}
    assert state == {**first["stages"], **second["stages"]}

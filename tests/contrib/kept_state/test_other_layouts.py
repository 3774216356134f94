"""What ranks of one layout have kept, ranks of another restore: the bits that a checkpoint has."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fleetpipe
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.contrib.kept_state.kept_state import KeptState
from fleetpipe.contrib.kept_state.layouts import KeptLayout, complete_layouts, newest_kept
from tests.checkpoint.ranks.test_ranks import LAYOUTS, Run, contents
from tests.fixtures import Call
from tests.pipelines import job

WRITERS = {
    **{name: LAYOUTS[name] for name in LAYOUTS if name != "alone"},
    "pp and mp": {"pp": 2, "mp": 2},
    "pp and dp": {"pp": 2, "dp": 2, "micro_batches": 2},
}
#: None has the degrees of a writer with other stages: the script is the same.
READERS = {"alone": {"pp": 2}, "mp": {"mp": 2}, "sharding": LAYOUTS["sharding"]}


def kept_of(run: Run, folder: Path) -> KeptState:
    folder.mkdir(exist_ok=True)
    return KeptState(folder, Objects(run.model, run.optimizer, run.rate), Ranks.of_job())


def write(home: Path, names: list[str]) -> None:
    """Trains under each layout, keeps two steps, and saves the second."""
    for name in names:
        with job(**{"micro_batches": 4, **WRITERS[name]}):
            run = Run()
            kept = kept_of(run, home / f"{name} kept")
            for step in range(2):
                run.train(step)
                kept.keep(step + 1)
            fleetpipe.CheckpointManager(home / name).save(2, **run.objects)


def read(home: Path, names: list[str]) -> dict[str, bool]:
    """Restores what all have kept, and saves it: whether the files are those of the checkpoint."""
    found = {}
    for name in names:
        with job(**{"micro_batches": 4, **READERS[name]}):
            for writer in WRITERS:
                run = Run()
                kept = kept_of(run, home / f"{writer} kept")
                assert kept.newest() == 2, writer
                kept.restore(2)
                copy = home / f"{name} from {writer}"
                fleetpipe.CheckpointManager(copy).save(2, **run.objects)
                same = contents(copy) == contents(home / writer)
                found[f"{name} from {writer}"] = same and run.rate.last_epoch == 2
    return found


def test_what_one_layout_has_kept_any_other_restores(on_ranks: Call, tmp_path: Path) -> None:
    of_four = [name for name in WRITERS if name.startswith("pp and")]
    on_ranks(write, 4, tmp_path, of_four)
    on_ranks(write, 2, tmp_path, [name for name in WRITERS if name not in of_four])
    first, _ = on_ranks(read, 2, tmp_path, ["mp", "sharding"])
    found = {**first, **read(tmp_path, ["alone"])}
    assert found == dict.fromkeys(
        [f"{one} from {other}" for one in READERS for other in WRITERS], True
    )


def fewer(home: Path, steps: list[int]) -> list[Any]:
    """Goes on from what is in a folder, and keeps some more steps; returns what is there then."""
    with job(2, 4):
        run = Run()
        kept = kept_of(run, home)
        newest = kept.newest()
        kept.restore(2)
        kept.forget_after(2)
        files = []
        for step in steps:
            run.train(step)
            kept.keep(step + 1)
            files.append(sorted(file.name for file in home.glob(f"rank-{run_rank()}.*")))
        return [newest, files, kept.newest(), kept.newest_of_all()]


def run_rank() -> int:
    return Ranks.of_job().rank


def test_states_of_more_ranks_stay_until_two_steps_of_fewer_are_kept(
    on_ranks: Call, tmp_path: Path
) -> None:
    home = tmp_path / "pp and dp kept"
    on_ranks(write, 4, tmp_path, ["pp and dp"])
    assert newest_kept(home) == (2, 4, (2,))
    first, second = on_ranks(fewer, 2, home, [2, 3])
    assert first == [2, [["rank-0.1", "rank-0.2"], ["rank-0.2"]], 4, 4]
    assert second == [2, [["rank-1.1", "rank-1.2"], ["rank-1.2"]], 4, 4]
    assert sorted(file.name for file in home.iterdir()) == ["rank-0.2", "rank-1.2"]
    (kept,) = complete_layouts(home)
    assert (kept.step, len(kept.segments), kept.smaller) == (4, 2, (1,))


def test_a_state_that_a_rank_lacks_is_none(on_ranks: Call, tmp_path: Path) -> None:
    on_ranks(write, 2, tmp_path, ["pp"])
    (tmp_path / "pp kept" / "rank-1.1").unlink()
    assert newest_kept(tmp_path / "pp kept") is None


@pytest.mark.parametrize(
    ("narrows", "degrees", "smaller"),
    [
        (["pp"], {"pp": 4, "dp": 2}, (6, 4, 2)),
        (["pp"], {"pp": 1, "dp": 2}, ()),
        (["dp", "pp"], {"pp": 2, "dp": 6}, (6, 4, 2, 1)),
        (["dp", "pp"], {"pp": 2, "dp": 5, "mp": 2}, (4, 2)),
        (["dp", "pp"], {"pp": 3, "dp": 1}, (2, 1)),
        (["dp"], {"pp": 3, "dp": 1}, ()),
    ],
)
def test_a_script_takes_as_many_ranks_as_its_samples_divide_by(
    narrows: list[str], degrees: dict[str, int], smaller: tuple[int, ...]
) -> None:
    segments = (SimpleNamespace(index={"narrows": narrows}),) * math.prod(degrees.values())
    assert KeptLayout(degrees, 1, segments).smaller == smaller  # type: ignore[arg-type]

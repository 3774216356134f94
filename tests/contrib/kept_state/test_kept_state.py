"""The state of every step in memory: bits come back, in the same layout and in others."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.contrib.kept_state import KeptLayout, complete_layouts, newest_kept
from fleetpipe.contrib.kept_state.kept_state import KeptState
from fleetpipe.errors import CheckpointError
from fleetpipe.mesh.groups import SoleGroup
from tests.checkpoint.ranks.test_ranks import LAYOUTS, Run, contents
from tests.fixtures import Call, LogCapture
from tests.pipelines import job


class Training:
    """A model that trains on one process, with all that decides its next bit."""

    def __init__(self) -> None:
        paddle.seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1D(8), nn.Linear(8, 4))
        self.rate = paddle.optimizer.lr.ExponentialDecay(0.1, 0.5)
        self.optimizer = paddle.optimizer.Adam(self.rate, parameters=self.model.parameters())
        self.objects = Objects(self.model, self.optimizer, self.rate)

    def step(self) -> list[bytes]:
        """Takes a step on random data; returns the bits of the loss and of all that trains."""
        noise = np.random.standard_normal((5, 6)) + random.random()
        loss = self.model(paddle.to_tensor(noise.astype("float32")) + paddle.rand([5, 6])).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.rate.step()
        tensors = [loss, *self.model.state_dict().values()]
        return [tensor.numpy().tobytes() for tensor in tensors]


def test_a_state_comes_back_with_its_bits_into_objects_that_are_built_anew(tmp_path: Path) -> None:
    training = Training()
    kept = KeptState(tmp_path, training.objects, Ranks(SoleGroup()))
    assert kept.newest() is None
    for step in range(1, 4):
        training.step()
        kept.keep(step)
    later = [training.step() for _ in range(3)]
    again = Training()
    kept = KeptState(tmp_path, again.objects, Ranks(SoleGroup()))
    assert kept.newest() == 3
    kept.restore(3)
    assert [again.step() for _ in range(3)] == later


def test_a_stage_without_a_tensor_keeps_what_is_none(tmp_path: Path) -> None:
    def opened() -> KeptState:
        return KeptState(tmp_path, Objects(nn.Sequential(nn.Tanh())), Ranks(SoleGroup()))

    kept = opened()
    kept.keep(1)
    drawn = np.random.random()
    again = opened()
    assert again.newest() == 1
    again.restore(1)
    assert np.random.random() == drawn


def test_steps_behind_the_one_gone_back_to_are_done_and_kept_again(tmp_path: Path) -> None:
    training = Training()
    kept = KeptState(tmp_path, training.objects, Ranks(SoleGroup()))
    done = {}
    for step in range(1, 4):
        done[step] = training.step()
        kept.keep(step)
    kept.restore(2)
    kept.forget_after(2)
    assert kept.newest() == 2
    assert training.step() == done[3]
    kept.keep(3)
    assert kept.newest() == 3


def test_a_state_of_another_form_replaces_the_old_one(
    tmp_path: Path,
) -> None:
    training = Training()
    kept = KeptState(tmp_path, training.objects, Ranks(SoleGroup()))
    files = []
    for step in range(4):  # before the first step there is no state of the optimizer
        kept.keep(step)
        files.append(sorted(file.suffix for file in tmp_path.iterdir()))
        training.step()
    assert files == [[".1"], [".1", ".2"], [".2"], [".2"]]


class Growing:
    """What it has is longer each time it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.values = np.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked, "values": np.full(self.asked, self.asked)}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.asked, self.values = state["asked"], state["values"]


def test_what_a_script_adds_is_that_of_one_moment_whatever_form_it_has(tmp_path: Path) -> None:
    def kept(growing: Growing) -> KeptState:
        objects = Objects(nn.Linear(2, 2), state={"growing": growing})
        return KeptState(tmp_path, objects, Ranks(SoleGroup()))

    store = kept(Growing())
    for step in range(1, 4):
        store.keep(step)
    again = Growing()
    kept(again).restore(3)
    assert (again.asked, again.values.tolist()) == (3, [3] * 3)


class OneOfThree:
    """A rank of three, whose others say what it says."""

    ranks = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.ranks


def kept_by(rank: int, folder: Path, objects: Objects) -> KeptState:
    return KeptState(folder, objects, Ranks(OneOfThree(rank)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "newest"),
    [([[1, 2], [2, 3]], 2), ([[2, 3], [3]], 3), ([[1], [3]], None), ([[], [2, 3]], None)],
)
def test_the_newest_step_is_one_that_every_rank_has_whole(
    tmp_path: Path, others: Sequence[Sequence[int]], newest: int | None
) -> None:
    training = Training()
    for rank, steps in enumerate([[1, 2, 3], *others]):
        training.step()
        kept = kept_by(rank, tmp_path, training.objects)
        for step in steps:
            kept.keep(step)
    assert [kept_by(rank, tmp_path, training.objects).newest() for rank in range(3)] == [newest] * 3


def test_states_of_other_ranks_stay_until_two_steps_in_a_row_are_kept(tmp_path: Path) -> None:
    training = Training()
    training.step()
    alone = KeptState(tmp_path, training.objects, Ranks(SoleGroup()))
    files = []
    for step in (1, 2, 4, 5):
        if step == 4:  # other ranks did the third
            for rank in range(3):
                kept_by(rank, tmp_path, training.objects).keep(3)
        alone.keep(step)
        files.append(len([*tmp_path.iterdir()]))
    assert files == [1, 1, 4, 1]


@pytest.mark.parametrize(("count", "said"), [(2, []), (3, ["a step has 6 samples now, not 4"])])
def test_a_step_that_has_other_samples_with_other_ranks_is_named(
    tmp_path: Path, caplog: LogCapture, count: int, said: list[str]
) -> None:
    training = Training()
    training.model.accumulate_steps = training.model.micro_batch_size = 2
    for rank in range(3):
        kept_by(rank, tmp_path, training.objects).keep(1)
    training.model.accumulate_steps = count
    alone = KeptState(tmp_path, training.objects, Ranks(SoleGroup()))
    assert alone.newest() == 1
    with caplog.at_level("WARNING", "fleetpipe"):
        alone.restore(1)
    assert [line.partition(":")[0] for line in caplog.messages] == said


def test_what_a_part_of_the_ranks_or_another_model_kept_is_not_taken(tmp_path: Path) -> None:
    training = Training()
    kept_by(0, tmp_path, training.objects).keep(1)
    assert KeptState(tmp_path, training.objects, Ranks(SoleGroup())).newest() is None
    training.step()
    KeptState(tmp_path, training.objects, Ranks(SoleGroup())).keep(1)
    other = KeptState(tmp_path, Objects(nn.Linear(6, 8)), Ranks(SoleGroup()))
    assert other.newest() == 1
    with pytest.raises(CheckpointError):
        other.restore(1)


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
            files.append(sorted(file.name for file in home.glob(f"rank-{Ranks.of_job().rank}.*")))
        return [newest, files, kept.newest(), kept.newest_of_all()]


def test_states_of_more_ranks_stay_for_two_steps_of_fewer(on_ranks: Call, tmp_path: Path) -> None:
    home = tmp_path / "pp and dp kept"
    on_ranks(write, 4, tmp_path, ["pp and dp"])
    assert newest_kept(home) == (2, 4, (2,))
    first, second = on_ranks(fewer, 2, home, [2, 3])
    assert first == [2, [["rank-0.1", "rank-0.2"], ["rank-0.2"]], 4, 4]
    assert second == [2, [["rank-1.1", "rank-1.2"], ["rank-1.2"]], 4, 4]
    assert sorted(file.name for file in home.iterdir()) == ["rank-0.2", "rank-1.2"]
    (kept,) = complete_layouts(home)
    assert (kept.step, len(kept.segments), kept.smaller) == (4, 2, (1,))
    (home / "rank-1.2").unlink()
    assert newest_kept(home) is None


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

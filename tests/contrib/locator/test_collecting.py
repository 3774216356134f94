"""What a script's layers are recorded as, which part of a tensor a rank has, runs without end."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

import fleetpipe
from fleetpipe import cli, fleet
from fleetpipe.contrib.locator import Location, locate_command, record
from fleetpipe.contrib.locator.collecting import collecting
from fleetpipe.contrib.locator.layouts import (
    DimensionCut,
    FullTensors,
    Layout,
    index_of_shard,
    possible_layouts,
)
from fleetpipe.contrib.locator.locate_command import _await_end, first_difference
from fleetpipe.contrib.locator.locate_options import Setting
from fleetpipe.contrib.locator.record import RankTensors, Record, TensorKey
from fleetpipe.contrib.locator.recorder import Finished, Recorder
from fleetpipe.contrib.locator.twin import Feed, degrees_of_one
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.errors import UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests import pipelines

nn: Any = paddle.nn


def _recorded(model: Any, folder: Path) -> record.RankTensors:
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with collecting(Recorder(folder, 1, 0)):
        model(paddle.ones([4, 3])).mean().backward()
        with pytest.raises(Finished):
            optimizer.step()
    (rank,) = record.read(folder).ranks
    return rank


def _located(train: Callable[[bool], None], folder: Path) -> Location | None:
    """Returns the first place where a job of one process differs from its twin.

    ``train`` is called with whether it is the job.
    """
    records = []
    for part in ("job", "twin", "moved"):
        (folder / part).mkdir()
        feed = None if part == "job" else Feed(folder / "job", part == "moved")
        with ExitStack() as stack:
            if feed is not None:
                stack.enter_context(degrees_of_one(1))
            stack.enter_context(collecting(Recorder(folder / part, 2, 0), feed))
            fleet.init(is_collective=True, strategy=pipelines.strategy(4, pp=2))
            stack.callback(fleet.shutdown)
            paddle.seed(3)
            with suppress(Finished):
                train(feed is None)
        records.append(record.read(folder / part))
    return first_difference(*records)


class _Net(nn.Layer):
    """A plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 8), nn.BatchNorm1D(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        return self.b(self.dropout(nn.functional.relu(self.norm(self.a(x)))))


class _Block(nn.Layer):
    """A layer with a skip connection, of which a way may be detached."""

    def __init__(self, detached: str) -> None:
        super().__init__()
        self.inner, self.detached = nn.Linear(3, 3), detached

    def forward(self, x: Any) -> Any:
        skip = x.detach() if self.detached == "skip" else x
        return skip + self.inner((x.detach() if self.detached == "branch" else x).tanh())


def _train(layers: list[Any] | None, factor: float) -> None:
    """Trains a list of layers, or a captured model, with so many times a loss."""

    def loss(output: Any, label: Any) -> Any:
        return nn.functional.mse_loss(output, label) * factor

    if layers is None:
        pipe: Any = fleetpipe.pipeline(_Net(), paddle.ones([pipelines.ROWS, 3]), loss, ["b"])
    else:
        pipe = PipelineLayer(layers, num_stages=2, loss_fn=loss)
    optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=pipe.parameters())
    model, optimizer = fleet.distributed_model(pipe), fleet.distributed_optimizer(optimizer)
    for step in range(2):
        rows = paddle.arange(4.0 * pipelines.ROWS * 3).reshape([-1, 3]) * (step + 1)
        model.train_batch([rows.sin(), rows.cos()], optimizer)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_captured_model_is_compared_with_itself_in_one_stage(
    factor: float, tmp_path: Path
) -> None:
    place = _located(lambda is_job: _train(None, factor if is_job else 1.0), tmp_path)
    assert (place and place.phase) == (None if factor == 1 else "loss"), place


@pytest.mark.parametrize(
    ("detached", "tied", "factor", "layer", "phase", "words"),
    [
        ("skip", True, 1.0, "1", "gradient", "lacks the gradient of its own output"),
        ("branch", True, 1.0, "1", "gradient", "of a skip connection, and nothing else"),
        ("", False, 1.0, "3", "initial", "3.weight: one device has no such parameter"),
        ("", True, 2.0, "", "loss", "2 times .* a sum over the 2 rows .* by the degree of pp$"),
        ("", True, 4.0, "", "loss", "4 times the loss, as where it is not divided by the 4 micro"),
        ("", True, 5.0, "", "loss", "5 times the loss$"),
        ("", True, 0.25, "", "loss", "1/4 of the loss, as where it is divided by the 4 micro"),
    ],
)
def test_the_cause_is_named(
    detached: str, tied: bool, factor: float, layer: str, phase: str, words: str, tmp_path: Path
) -> None:
    def train(is_job: bool) -> None:
        ends: list[Any] = [SharedLayerDesc("first", nn.Linear, None, "weight", 3, 3)] * 2
        if is_job and not tied:
            ends[1] = LayerDesc(nn.Linear, 3, 3)
        blocks = [LayerDesc(_Block, detached if is_job else ""), LayerDesc(_Block, "")]
        _train([ends[0], *blocks, ends[1]], factor if is_job else 1.0)

    place = _located(train, tmp_path)
    assert place is not None
    assert (place.layer, place.phase) == (layer, phase)
    assert re.search(words, place.cause), place


def test_a_vocabulary_head_in_parts_is_refused(tmp_path: Path) -> None:
    def train(_: bool) -> None:
        layers = [nn.Linear(3, 8), nn.Linear(8, 8), VocabularyHead(8, 4)]
        pipe = fleet.distributed_model(PipelineLayer(layers, 2, loss_fn=VocabularyLoss()))
        data = [paddle.ones([8, 3]), paddle.ones([8], "int64")]
        pipe.train_batch(data, paddle.optimizer.SGD(0.1, parameters=pipe.parameters()))

    with pytest.raises(UsageError, match="compares no vocabulary head"):
        _located(train, tmp_path)


def test_what_a_dropout_keeps_of_zeros_is_recorded_too(tmp_path: Path) -> None:
    """Without gradients, as in the first run of what is computed again, too."""

    class Model(nn.Sequential):
        def forward(self, x: Any) -> Any:
            x = self[0](x)
            return fleet.utils.recompute(self[1], x)

    inner = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
    model = Model(nn.Linear(3, 64), inner)
    model[0].bias.set_value(paddle.full([64], -100.0))
    rank = _recorded(model, tmp_path)
    (mask,) = (t for p, t in rank.in_phase(0, "forward").items() if p.role == "mask")
    assert 0.3 < mask.mean() < 0.7


def test_running_statistics_are_buffers_and_no_update(tmp_path: Path) -> None:
    rank = _recorded(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1D(2)), tmp_path)
    assert rank.by_name(0, "buffer").keys() == {"1._mean", "1._variance"}
    assert rank.by_name(0, "update").keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_running_statistics_begin_a_step_as_the_one_before_left_them() -> None:
    here = record.RankTensors(0, {})
    for step, (phase, value) in enumerate([("initial", 1.0), ("buffer", 2.0), ("buffer", 3.0)]):
        place = record.TensorKey(max(step - 1, 0), phase, "1._mean", role="buffer")
        here.tensors[place] = np.array([value])
    whole = FullTensors(record.Record([here], {}))
    values = [whole.parameter(step, "1._mean", np.zeros(1)) for step in (0, 1)]
    assert [value and value.item() for value in values] == [1.0, 2.0]


def test_the_gradient_that_first_shows_how_a_bias_is_split_counts_for_it() -> None:
    """Each rank of two has its part of q, k and v; zeros do not say so, the gradients do."""
    ranks = [record.RankTensors(rank, {"mp": rank}) for rank in (0, 1)]
    whole = np.arange(12.0)
    for here, own in zip(ranks, whole.reshape(3, 2, 2).transpose(1, 0, 2).reshape(2, 6)):
        listing = record.TensorKey(0, "optimizer input", "", role="parameters")
        here.tensors[listing] = np.frombuffer(b'["qkv.bias"]', "uint8")
        for step, phase, value in (
            (0, "initial", own * 0),
            (0, "reduction", own),
            (1, "initial", own),
        ):
            here.tensors[record.TensorKey(step, phase, "qkv.bias")] = value
    parts = FullTensors(record.Record(ranks, {"mp": 2}))
    assert np.array_equal(parts.parameter(0, "qkv.bias", whole * 0), whole * 0)
    assert np.array_equal(parts.gradient(0, "qkv.bias", whole), whole)
    assert np.array_equal(parts.parameter(1, "qkv.bias", whole * 0), whole)


def test_a_pipeline_with_an_optimizer_of_its_own_is_one_model(tmp_path: Path) -> None:
    fleet.init(is_collective=True, strategy=pipelines.strategy(2))
    try:
        with collecting(Recorder(tmp_path, 1, 0)):
            described = [nn.Linear(3, 3), nn.Linear(3, 2)]
            layers = PipelineLayer(described, num_stages=1, loss_fn=nn.MSELoss())
            model = fleet.distributed_model(layers)
            optimizer = paddle.optimizer.SGD(0.1, parameters=layers.parameters()[2:])
            rows = paddle.ones([2 * pipelines.ROWS, 3])
            for _ in range(2):
                model.forward_backward_pipeline([rows, rows[:, :2]])
            with pytest.raises(Finished):
                optimizer.step()
    finally:
        fleet.shutdown()
    (rank,) = record.read(tmp_path).ranks
    assert rank.by_name(0, "initial").keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert {place.micro_batch for place in rank.in_phase(0, "forward")} == {0, 1, 2, 3}
    assert "gradient" not in {place.role for place in rank.in_phase(0, "gradient")}


def test_a_layer_that_is_not_trained_is_one_of_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1D(2))
    model[1].eval()
    assert {p.name for p in _recorded(model, tmp_path).in_phase(0, "forward")} == {"0", "1", ""}


def test_what_comes_to_experts_of_one_rank_is_no_replicas(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for parameter in model[1].parameters():
        parameter.no_sync = True
    rank = _recorded(model, tmp_path)
    assert {p.name for p in rank.in_phase(0, "forward")} == {"0", ""}
    assert "1.0.weight" in rank.by_name(0, "reduction")


def test_a_twin_that_reads_on_has_the_rate_of_the_job(tmp_path: Path) -> None:
    here = record.RankTensors(0, {})
    place = record.TensorKey(0, "optimizer input", "", role="learning rate")
    here.tensors[place] = np.asarray(0.25)
    record.write(tmp_path, here, {"dp": 2}, 0)
    scheduler = paddle.optimizer.lr.StepDecay(0.5, step_size=1)
    optimizer = paddle.optimizer.SGD(scheduler, parameters=nn.Linear(1, 1).parameters())
    Feed(tmp_path, perturbed=False).set_rate(0, optimizer)
    assert optimizer.get_lr() == 0.25


def _writing(ranks: int, steps: int) -> Callable[..., None]:
    """Returns what writes the record of a job, or of a twin of one step, in place of a run."""

    def start(_: object, setting: Setting) -> None:
        counts = (1, 1) if setting.job else (ranks, steps)
        for rank, step in itertools.product(*map(range, counts)):
            here = record.RankTensors(rank, {})
            here.tensors[record.TensorKey(step, "update", "weight")] = np.array([ranks])
            record.write(Path(setting.folder), here, {}, step)

    return start


def test_steps_that_the_twin_lacks_are_no_equal_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate_command, "_run_recorded", _writing(1, 2))
    with pytest.raises(UsageError, match="after 1 of the job's 2 steps"):
        locate_command.locate("train.py", log_dir=tmp_path)


def test_a_folder_that_is_recorded_into_twice_has_the_second_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in (2, 1):
        monkeypatch.setattr(locate_command, "_run_recorded", _writing(ranks, 1))
        assert locate_command.locate("train.py", record=tmp_path, log_dir=tmp_path) is None
        job = record.read(tmp_path / "job")
        assert [rank.rank for rank in job.ranks] == [*range(ranks)]
        assert all(t.item() == ranks for rank in job.ranks for t in rank.tensors.values())


@pytest.mark.parametrize("parts", [[], ["twin"]])
def test_a_folder_without_a_record_is_refused_before_the_job_runs(
    parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in parts:
        (tmp_path / part).mkdir()
        record.write(tmp_path / part, record.RankTensors(0, {}), {}, 0)
    monkeypatch.setattr(locate_command, "_run_recorded", None)
    with pytest.raises(UsageError, match="has no record of a twin"):
        locate_command.locate("train.py", against=tmp_path, log_dir=tmp_path)


def test_an_error_of_its_own_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def located(_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(locate_command, "find_difference", located)
    assert cli.main(["locate", __file__]) == 2
    assert "KeyError: 'a defect'" in capfd.readouterr().err


def test_a_run_without_a_step_is_ended_at_its_limit(tmp_path: Path) -> None:
    waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert "within 1 seconds" in _await_end(waiting, tmp_path, 1.0)
    assert waiting.returncode


@pytest.mark.parametrize(
    "change", [None, {"degrees": []}, {"places": [[0]]}, {"sources": {"5": []}}]
)
def test_what_is_no_record_is_refused(change: dict[str, Any] | None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trained no step"):
        record.read(tmp_path)
    file = tmp_path / "rank-00000.step-000000.safetensors"
    place = [0, "data", "x", -1, "", 0]
    index = {"rank": 0, "coordinate": {}, "degrees": {}, "places": [place], "sources": {}}
    save_file({"0": np.zeros(2)}, file, metadata={"record": json.dumps(index)})
    assert record.read(tmp_path).steps == 1
    if change is None:
        file.write_bytes(b"nothing")
    else:
        save_file({"0": np.zeros(2)}, file, metadata={"record": json.dumps({**index, **change})})
    with pytest.raises(UsageError, match=r"no record of a run, or is damaged[\s\S]*rank-00000"):
        record.read(tmp_path)


WHOLE = np.arange(8 * 6).reshape(8, 6)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ((DimensionCut(0, ("mp",)),), [4, 5, 6, 7]),
        ((DimensionCut(0, ("mp",), parts=2),), [2, 3, 6, 7]),
        ((DimensionCut(0, ("cp",), zigzag=True),), [2, 3, 4, 5]),
        ((DimensionCut(0, ("sep", "mp")),), [6, 7]),
        ((DimensionCut(0, ("cp", "sep"), zigzag=True),), [4, 5]),
    ],
)
def test_a_rank_has_the_rows_of_its_coordinate(layout: Layout, rows: list[int]) -> None:
    coordinate = {"mp": 1, "cp": 1, "sep": 1}
    places = index_of_shard(WHOLE.shape, layout, coordinate, {"mp": 2, "cp": 2, "sep": 2})
    assert np.array_equal(WHOLE[places], WHOLE[rows])


def test_all_ranks_parts_make_the_whole() -> None:
    degrees = {"mp": 2}
    for layout in possible_layouts(WHOLE.shape, (4, 6), degrees):
        whole = np.zeros_like(WHOLE)
        for rank in range(2):
            places = index_of_shard(WHOLE.shape, layout, {"mp": rank}, degrees)
            whole[places] = WHOLE[places]
        assert np.array_equal(whole, WHOLE)


def test_shapes_that_no_degree_explains_are_no_parts() -> None:
    assert not list(possible_layouts((8, 6), (3, 6), {"mp": 2}))
    assert not list(possible_layouts((8, 6), (8,), {"mp": 2}))
    assert list(possible_layouts((8, 6), (8, 6), {"mp": 2})) == [()]


def test_the_way_in_which_two_axes_split_two_dimensions_is_among_those_that_are_tried() -> None:
    degrees = {"mp": 2, "cp": 2}
    ways = list(possible_layouts((24, 2, 48), (12, 2, 24), degrees))
    assert (DimensionCut(0, ("cp",), zigzag=True), DimensionCut(2, ("mp",))) in ways


@pytest.mark.parametrize(
    ("zigzag", "tokens"),
    # The last fit pieces of both orders.
    [(False, range(8)), (True, range(8)), (True, [4, 16, 2, 8, 14, 14, 14, 14])],
)
def test_masks_of_parts_are_joined_in_the_order_of_the_samples(
    zigzag: bool, tokens: Sequence[int]
) -> None:
    """Members along mp have the same; along cp pieces that the samples alone put in order."""
    degrees, cut = {"mp": 2, "cp": 2}, DimensionCut(1, ("cp",), zigzag=zigzag)
    drawn = np.random.default_rng(3).random([2, 8]) < 0.5
    data, kept = TensorKey(0, "data", "", 0, "input"), TensorKey(0, "forward", "drop", 0, "mask")
    twin, ranks = RankTensors(0, {}), []
    twin.tensors[data] = np.array([tokens, tokens])
    for number in range(4):
        here = RankTensors(number, {"mp": number % 2, "cp": number // 2})
        for place, whole in ((data, twin.tensors[data]), (kept, drawn)):
            here.tensors[place] = whole[
                index_of_shard(whole.shape, (cut,), here.coordinate, degrees)
            ]
        ranks.append(here)
    mask = FullTensors(Record(ranks, degrees)).mask(kept, (2, 8), twin)
    assert mask is not None
    assert np.array_equal(mask, drawn)

"""Fleet's checkpoint folders, state dicts and the state of optimizers, and the names in them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineLayer as StockPipelineLayer

from fleetpipe import fleet
from fleetpipe.dygraph.state import files
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet import meta_parallel
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from fleetpipe.fleet_files.manifest import LayerFile, Writer
from tests.dygraph import models
from tests.dygraph.models import MODELS
from tests.pipelines import adam, batch, bits, job, mlp_layers, model_in_job, pipeline

IN_TWO_CHUNKS = [f"{layer:02d}-virtual_pp_stage_{layer // 4:02d}" for layer in (0, 2, 4, 6, 7)]
SUFFIX = "model_states.pdparams"
WEIGHT = "shared_layers.embed.table.weight"


def names(folder: Path) -> list[str]:
    return sorted(path.name.replace(f"-{SUFFIX}", "") for path in folder.glob("*.pdparams"))


def moved(layers: Any) -> dict[str, bytes]:
    """Gives every parameter other values; returns the bits of all."""
    for parameter in layers.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    return bits(layers.full_state_dict())


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("1F1B", None, ["00", "02", "04", "06", "07"]),
        ("Interleaved1F1B", 2, IN_TWO_CHUNKS),
        ("ZBV", None, IN_TWO_CHUNKS),
    ],
)
def test_each_layer_has_a_file_under_fleets_name(
    tmp_path: Path, schedule: str, chunks: int | None, expected: list[str]
) -> None:
    # 0 1 | 2 3 | 4 5 | 6 7: functions at 1, 3 and 5 have none, a layer without parameters has one.
    layers, folder = [*mlp_layers(), LayerDesc(nn.Identity)], tmp_path / "new" / "folder"
    with model_in_job(2, 4, schedule, layers=layers, num_virtual_pipeline_stages=chunks) as model:
        model.layers.save_state_dict(folder)
    assert (folder / "manifest-000.json").exists()
    assert names(folder) == [f"layer_{name}-tensor_00" for name in expected]


def test_a_save_is_whole_until_all_ranks_have_written_the_next(tmp_path: Path) -> None:
    places = [LayerFile(number) for number in range(3)]

    def save(rank: int, run: str, ranks: int) -> None:
        layers = {}
        for place in places[rank::ranks]:
            layers[place] = nn.Linear(3, 3).state_dict()
            layers[place]["bias"].set_value(paddle.full([3], len(run)))
        files.save(tmp_path, layers, 0, Writer(f"{run}/1", rank, ranks))

    def loaded() -> set[float]:
        layers = {place: nn.Linear(3, 3) for place in places}
        files.load(tmp_path, layers, 0, 1)
        return {float(layer.bias[0]) for layer in layers.values()}

    for rank in range(3):
        save(rank, "1", 3)
    assert loaded() == {1}
    # Fewer ranks, each with layers of several earlier ones; rank 1 is killed before it begins.
    save(0, "22", 2)
    assert loaded() == {1}
    # Another attempt, in another order, with more ranks; the last is killed.
    for rank in (2, 0):
        save(rank, "333", 3)
        assert loaded() == {1}
    save(1, "333", 3)
    assert loaded() == {3}
    save(0, "4444", 1)
    assert loaded() == {4}
    assert [path.name for path in tmp_path.glob("manifest-*")] == ["manifest-000.json"]
    assert not (tmp_path / "replaced").exists()


def test_layers_of_two_saves_and_missing_ones_are_refused_by_name(tmp_path: Path) -> None:
    places = [LayerFile(number) for number in range(2)]

    def save(folder: Path, rank: int, run: str) -> None:
        layers = {places[rank]: nn.Linear(3, 3).state_dict()}
        files.save(folder, layers, 0, Writer(f"{run}/1", rank, 2))

    def load(folder: Path) -> None:
        files.load(folder, {place: nn.Linear(3, 3) for place in places}, 0, 1)

    for rank, name in enumerate(("one", "other")):
        save(tmp_path / name, rank, name)
        shutil.copytree(tmp_path / name, tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"layers of two saves\n.*\n.*manifest-000\.json and"):
        load(tmp_path / "both")
    for rank in range(2):
        save(tmp_path, rank, "all")
    first = tmp_path / f"layer_00-tensor_00-{SUFFIX}"
    paddle.save(nn.Linear(3, 3).state_dict(), str(first))
    with pytest.raises(CheckpointError, match=r"layer_00-.* has another digest than its manifest"):
        load(tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match=r"is missing: layer_00-tensor_00-"):
        load(tmp_path)
    for path in tmp_path.glob("manifest-*.json"):
        path.unlink()
    paddle.save(nn.Linear(3, 3).state_dict(), str(first))
    load(tmp_path)  # as a folder of Fleet's


@pytest.mark.parametrize("writer", [(2, "1F1B", None), (2, "Interleaved1F1B", 3)])
def test_a_folder_is_read_by_any_number_of_ranks_and_chunks(
    tmp_path: Path, writer: tuple[int, str, int | None]
) -> None:
    expected = None
    for ranks, schedule, chunks in (writer, (1, "1F1B", None), (3, "ZBH1", None), (2, "ZBV", None)):
        options = {"loss_fn": models.loss, "num_virtual_pipeline_stages": chunks}
        with model_in_job(ranks, 4, schedule, layers=models.layers(), **options) as model:
            layers = model.layers
            if expected is None:
                expected = moved(layers)
                layers.save_state_dict(str(tmp_path))
            else:
                assert bits(layers.full_state_dict()) != expected
                layers.set_state_dir(str(tmp_path))
                assert bits(layers.full_state_dict()) == expected


def require_same(ours: Any, stock: Any) -> None:
    for mine, theirs in zip(ours.parameters(), stock.parameters()):
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.skipif(
    not hasattr(meta_parallel, "LayerSpec"), reason="2.6.2 cannot build a PipelineLayer alone"
)
@pytest.mark.parametrize("chunks", [None, 2])
def test_what_stock_fleet_wrote_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int | None
) -> None:
    fleet.shutdown()
    # Without this attribute, which CPU wheels lack, Paddle's class cannot be built there.
    monkeypatch.setattr(paddle.distributed.ParallelEnv, "device_id", 0, raising=False)
    entries = [*models.layers(), LayerDesc(nn.Identity)]
    options: dict[str, Any] = {"num_stages": 1, "loss_fn": models.loss}
    if chunks:
        options.update(num_virtual_pipeline_stages=chunks, seg_method="layer:FeedForward")
    stock = StockPipelineLayer(layers=entries, **options)
    for parameter in stock.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    stock.save_state_dict(str(tmp_path / "theirs"))
    ours = PipelineLayer(entries, **options)
    ours.set_state_dir(tmp_path / "theirs")
    require_same(ours, stock)
    if chunks is None:
        assert list(ours.state_dict()) == list(stock.state_dict())
    ours.save_state_dict(tmp_path / "ours")
    assert names(tmp_path / "ours") == names(tmp_path / "theirs")
    for parameter in stock.parameters():
        parameter.set_value(paddle.zeros(parameter.shape))
    stock.set_state_dir(str(tmp_path / "ours"))
    require_same(ours, stock)


@pytest.mark.parametrize(
    ("first", "last", "written"),
    [
        (models.tied(), models.tied(models.logits), [0]),
        (models.tied(models.logits), models.tied(), [2]),
        (models.tied(models.logits), models.tied(models.logits), [0]),
        (models.tied(), models.tied(), [0, 2]),
        # Of another class, with the weight of the first.
        (models.tied(), SharedLayerDesc("embed", models.Head, None, "embedding_weight"), [0, 2]),
    ],
)
def test_a_shared_layer_is_written_where_it_is_called(
    tmp_path: Path, first: Any, last: Any, written: list[int]
) -> None:
    layers = PipelineLayer([first, nn.functional.relu, last], num_stages=1)
    expected = moved(layers)
    layers.save_state_dict(tmp_path)
    assert names(tmp_path) == [f"layer_{index:02d}-tensor_00" for index in written]
    moved(layers)
    layers.set_state_dir(tmp_path)
    assert bits(layers.full_state_dict()) == expected


def test_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    layers = PipelineLayer(mlp_layers(), num_stages=1)
    with pytest.raises(CheckpointError, match="no such folder"):
        layers.set_state_dir(tmp_path / "nowhere")
    layers.save_state_dict(tmp_path)
    expected = moved(layers)
    last = tmp_path / "layer_06-tensor_00-model_states.pdparams"
    kept = last.read_bytes()
    for contents, message in [
        (None, r"a file of the save is missing: layer_06-tensor_00"),
        ({"weight": paddle.ones([8, 5]), "bias": paddle.ones([4])}, r"shape \[8, 4\]"),
        ({"weight": paddle.ones([8, 4])}, r"'bias' in layer_06[\s\S]*nothing of that name"),
        (
            {"weight": paddle.ones([8, 4], "float64"), "bias": paddle.ones([4])},
            r"expected: float32 of shape \[8, 4\]\s+got: float64 of shape \[8, 4\]",
        ),
        ({"weight": [1], "bias": paddle.ones([4])}, r"got: a list"),
        (b"", "it is empty"),
        (kept[:-100], "layer_06-tensor_00-model_states.pdparams is not what paddle.save writes"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"the name 'os\.system'"),
    ]:
        last.unlink()
        if isinstance(contents, bytes):
            last.write_bytes(contents)
        elif contents is not None:
            paddle.save(contents, str(last))
        with pytest.raises(CheckpointError, match=message):
            layers.set_state_dir(tmp_path)
        assert bits(layers.full_state_dict()) == expected
        last.touch()
    for chunk in (0, 1):
        name = f"layer_06-virtual_pp_stage_{chunk:02d}-tensor_00-model_states.pdparams"
        (tmp_path / name).write_bytes(kept)
    last.unlink()
    (tmp_path / "manifest-000.json").unlink()  # which names it
    with pytest.raises(CheckpointError, match="layer 6 was saved here as part of several chunks"):
        layers.set_state_dir(tmp_path)


def test_values_of_another_dtype_change_nothing() -> None:
    layers = PipelineLayer(mlp_layers(), num_stages=1)
    expected = moved(layers)
    state = {name: value + 1 for name, value in layers.full_state_dict().items()}
    last = list(state)[-1]
    for wrong in (state[last].astype("float64"), state[last].numpy().astype("float64")):
        with pytest.raises(CheckpointError, match=rf"'{last}' does not fit[\s\S]*float64"):
            layers.load_from({**state, last: wrong})
    assert bits(layers.full_state_dict()) == expected
    layers.load_from(state)
    assert bits(layers.full_state_dict()) != expected


def test_slices_are_read_as_fleet_assigns_them(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    for tensor_shard in range(4):
        layer.bias.set_value(paddle.full([2], float(tensor_shard)))
        writer = Writer("run/1", tensor_shard, 5)
        place = LayerFile(104)
        files.save(tmp_path, {place: layer.state_dict()}, tensor_shard, writer)
    other = {LayerFile(10): nn.Linear(2, 2).state_dict()}
    files.save(tmp_path, other, 0, Writer("run/1", 4, 5))
    assert names(tmp_path)[1:3] == ["layer_104-tensor_00", "layer_104-tensor_01"]
    for tensor_shard, slices, expected in [(1, 4, 1), (1, 2, 2), (0, 1, 0), (5, 8, 2)]:
        files.load(tmp_path, {LayerFile(104): layer}, tensor_shard, slices)
        assert layer.bias.tolist() == [expected, expected]


def test_the_first_replica_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = PipelineLayer(mlp_layers(), num_stages=1)
    monkeypatch.setattr(paddle.distributed, "get_rank", lambda: 1)
    layers.save_state_dict(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_state_dicts_have_fleets_keys(schedule: str) -> None:
    with job(2, 4, schedule):
        model = pipeline(models.layers(), loss_fn=models.loss)
        state = model.state_dict()
        assert list(state)[:2] == ["_layers.shared_layers.embed.scale", f"_layers.{WEIGHT}"]
        assert list(state) == [f"_layers.{name}" for name in model.layers.state_dict()]
        saved = {name: tensor.numpy() for name, tensor in state.items()}
        expected = bits(model.layers.state_dict())
        moved(model.layers)
        missing, unexpected = model.set_state_dict(saved)
        assert (missing, unexpected) == ([], [])
        assert bits(model.layers.state_dict()) == expected


def test_training_goes_on_after_a_reload_with_the_same_bits(tmp_path: Path) -> None:
    def train(steps: range, reads: bool = False) -> tuple[list[bytes], dict[str, bytes]]:
        with job(2, 4, "ZBH1"), paddle.utils.unique_name.guard():
            model = pipeline()
            rate = paddle.optimizer.lr.StepDecay(0.05, step_size=2, gamma=0.3)
            optimizer = adam(model, rate, weight_decay=0.1)
            files = {"model.pdparams": model, "model.pdopt": optimizer}
            for name, part in files.items() if reads else ():
                part.set_state_dict(paddle.load(str(tmp_path / name)))
            losses = []
            for step in steps:
                if step == 3 and not reads:
                    for name, part in files.items():
                        paddle.save(part.state_dict(), str(tmp_path / name))
                losses.append(
                    model.train_batch(batch(seed=step), optimizer, rate).numpy().tobytes()
                )
            return losses, bits(model.state_dict())

    losses, end = train(range(7))
    assert train(range(3, 7), reads=True) == (losses[3:], end)


def test_a_single_model_comes_and_goes_at_any_cut() -> None:
    single = PipelineLayer(models.layers(), num_stages=1).single_model()
    for parameter in single.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    ids, _ = MODELS["gpt"].batch(4, 0)
    expected = single(ids).numpy().tobytes()
    for ranks, schedule, chunks in [(1, "1F1B", 3), (2, "ZBV", None), (4, "FThenB", None)]:
        options = {"loss_fn": models.loss, "num_virtual_pipeline_stages": chunks}
        with model_in_job(ranks, 4, schedule, layers=models.layers(), **options) as model:
            layers = model.layers
            # Names depend on nothing.
            assert {*layers.state_dict()} == {*single.state_dict()}
            for source in (single, single.state_dict()):
                moved(layers)
                layers.load_from(source)
                assert layers(ids).numpy().tobytes() == expected
            moved(layers)
            layers.set_state_dict(single.state_dict())
            other = layers.single_model()
            layers.copy_to(other)
            assert other(ids).numpy().tobytes() == expected


class Plain(nn.Layer):
    """Declares its layers in the other order than it runs them; both have the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(2, 2)
        self.first = nn.Linear(2, 2)


def test_a_plain_models_values_are_found_by_its_own_names() -> None:
    pipe = PipelineLayer([LayerDesc(nn.Linear, 2, 2) for _ in range(2)], num_stages=1)
    pipe.state.plain_names = {
        f"{name}.{part}": f"{index}.{part}"
        for name, index in (("second", 1), ("first", 0))
        for part in ("weight", "bias")
    }
    plain, other = Plain(), Plain()
    pipe.load_from(plain)
    assert bits(pipe.own_state())["0.weight"] == bits(plain.state_dict())["first.weight"]
    assert pipe.state.names_in(plain)["first.weight"] == "0.weight"
    pipe.copy_to(other)
    assert bits(other.state_dict()) == bits(plain.state_dict())
    plain.first = nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=r"does not fit the pipeline's '0\.weight'"):
        pipe.load_from(plain)
    # Names of the pipeline, and an order, still count.
    sequential = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe.load_from(sequential)
    assert list(bits(pipe.own_state()).values()) == list(bits(sequential.state_dict()).values())

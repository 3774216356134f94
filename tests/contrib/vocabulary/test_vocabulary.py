"""A head in parts: the single model's bits, and one parameter in a checkpoint of any ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.dygraph import (
    VocabularyEmbedding,
    VocabularyHead,
    VocabularyLoss,
    vocabulary_cross_entropy,
)
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import FEATURES, ROWS, bits, job, mlp_layers, pipeline, sgd

HIDDEN, VOCABULARY, MICRO_BATCHES = 8, 11, 4


def layers() -> list[Any]:
    return [*mlp_layers(HIDDEN)[:-1], VocabularyHead(HIDDEN, VOCABULARY)]


def batch(seed: int = 0) -> list[Any]:
    """[inputs, labels], one label ignored, the classes of all parts among the others."""
    numbers = np.random.default_rng(seed)
    rows = MICRO_BATCHES * ROWS
    labels = numbers.permutation(VOCABULARY)[:rows, None]
    labels[1] = -100
    inputs = numbers.standard_normal((rows, FEATURES)).astype("float32")
    return [paddle.to_tensor(inputs), paddle.to_tensor(labels)]


def micro_batches(data: list[Any]) -> list[list[Any]]:
    return [[t[k * ROWS : (k + 1) * ROWS] for t in data] for k in range(MICRO_BATCHES)]


@pytest.mark.once_for("4")
@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "ZBH1"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_has_the_bits_of_one_model_with_the_same_parts(schedule: str, ranks: int) -> None:
    with job(pp=ranks, micro_batches=MICRO_BATCHES, schedule=schedule):
        recompute = {"recompute_interval": 1, "recompute_ctx": {}} if schedule == "FThenB" else {}
        model = pipeline(layers(), loss_fn=VocabularyLoss(), **recompute)
        single = model._layers.single_model()
        model._layers.copy_to(single)
        optimizer = adam(model)
        alone = paddle.optimizer.Adam(0.1, parameters=single.parameters())
        for step in range(3):
            loss = model.train_batch(batch(step), optimizer)
            expected = paddle.zeros([])
            for inputs, labels in micro_batches(batch(step)):
                share = VocabularyLoss()(single(inputs), labels) / MICRO_BATCHES
                share.backward()
                expected = expected + share.detach()
            alone.step()
            alone.clear_grad()
            assert float(loss) == float(expected)
            assert bits(model._layers.own_state()) == bits(single.state_dict())
        evaluated = model.eval_batch(batch(9), compute_loss=True)
        single.eval()
        shares = [VocabularyLoss()(single(x), y) for x, y in micro_batches(batch(9))]
        assert float(evaluated) == float(sum(one / MICRO_BATCHES for one in shares))


def adam(model: Any) -> Any:
    return fleet.distributed_optimizer(paddle.optimizer.Adam(0.1, parameters=model.parameters()))


def whole(tensors: dict[str, Any], first: int) -> dict[str, Any]:
    """Tensors by name, in the place of the parts of a head on two ranks those of a Linear."""
    joined = dict(tensors)
    for name in [name for name in tensors if name.startswith(f"{first}.")]:
        both = paddle.concat(
            [joined.pop(name), joined.pop(name.replace(str(first), str(first + 1)))]
        )
        joined[name] = both.t() if both.ndim == 2 else both
    return joined


@pytest.mark.parametrize("bias", [None, False])
@pytest.mark.parametrize(("reduction", "ignored"), [("mean", -100), ("mean", 3), ("sum", 3)])
def test_it_is_plain_cross_entropy_up_to_rounding(reduction: str, ignored: int, bias: Any) -> None:
    entries = mlp_layers(HIDDEN)[:-1]
    with_linear = [*entries, LayerDesc(nn.Linear, HIDDEN, VOCABULARY, bias_attr=bias)]
    with_head = [*entries, VocabularyHead(HIDDEN, VOCABULARY, bias_attr=bias)]
    with job(pp=2, micro_batches=MICRO_BATCHES):
        model = pipeline(with_head, loss_fn=VocabularyLoss(ignored, reduction))
        plain = PipelineLayer(with_linear, num_stages=1).single_model()
        plain.set_state_dict(whole(model._layers.own_state(), len(entries)))
        data = batch()
        data[1] = paddle.where(data[1] == -100, paddle.full_like(data[1], ignored), data[1])
        loss = model.forward_backward_pipeline(data)
        criterion = nn.CrossEntropyLoss(ignore_index=ignored, reduction=reduction)
        for inputs, labels in micro_batches(data):
            (criterion(plain(inputs), labels) / MICRO_BATCHES).backward()
            loss = loss - criterion(plain(inputs), labels) / MICRO_BATCHES
        assert abs(float(loss)) < 1e-5
        gradients = {name: one.grad for name, one in model._layers.own_state().items()}
        gradients = whole(gradients, len(entries))
        for name, parameter in plain.named_parameters():
            np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def embedding_and_head(data: list[Any], weight: Any, blocks: Sequence[Any]) -> Any:
    """Gradients of a plain model whose head is its embedding."""
    for tokens, labels in micro_batches(data):
        hidden = nn.functional.embedding(tokens, weight)
        for block in blocks:
            hidden = block(hidden)
        logits = paddle.matmul(hidden, weight, transpose_y=True)
        (nn.CrossEntropyLoss()(logits, labels) / MICRO_BATCHES).backward()
    return weight.grad


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_may_be_tied_to_the_embedding(ranks: int) -> None:
    blocks = [LayerDesc(nn.Linear, HIDDEN, HIDDEN) for _ in range(2)]
    head = VocabularyHead(HIDDEN, VOCABULARY, tied="words")
    entries = [VocabularyEmbedding("words", HIDDEN, VOCABULARY), *blocks, head]
    tokens, labels = (
        paddle.to_tensor(np.random.default_rng(seed).integers(0, VOCABULARY, (8, 3)))
        for seed in range(2)
    )
    with job(pp=ranks, micro_batches=MICRO_BATCHES):
        model = pipeline(entries, loss_fn=VocabularyLoss())
        state = model._layers.own_state()
        names = [f"shared_layers.words.part{part}" for part in range(ranks)]
        assert {*state} == {*names, "1.weight", "1.bias", "2.weight", "2.bias"}
        weight = paddle.concat([state[name] for name in names]).detach()
        weight.stop_gradient = False
        linears = [nn.Linear(HIDDEN, HIDDEN) for _ in blocks]
        for number, linear in enumerate(linears, 1):
            linear.set_state_dict({name: state[f"{number}.{name}"] for name in ("weight", "bias")})
        model.forward_backward_pipeline([tokens, labels])
        expected = embedding_and_head([tokens, labels], weight, linears)
        gradient = paddle.concat([state[name].grad for name in names])
        np.testing.assert_allclose(gradient.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
        pairs = [(state["1.weight"], linears[0].weight), (state["2.bias"], linears[1].bias)]
        for mine, plain in pairs:
            np.testing.assert_allclose(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_of_each_row_is_cross_entropys() -> None:
    single = PipelineLayer(layers(), num_stages=3).single_model()
    inputs, labels = batch()
    output = single(inputs)
    rows = vocabulary_cross_entropy(output, labels)
    weight = paddle.concat([part.weight for part in output.parts])
    assert [part.weight.shape[0] for part in output.parts] == [3, 4, 4]
    logits = paddle.matmul(output.hidden, weight, transpose_y=True)
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    assert rows.shape == labels.shape
    np.testing.assert_allclose(rows.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_loss_of_ones_own_may_weight_rows_and_take_labels_in_a_tuple() -> None:
    def weighted(output: Any, labels: Any) -> Any:
        classes, weights = labels
        return (vocabulary_cross_entropy(output, classes) * weights).sum()

    inputs, classes = batch()
    weights = paddle.arange(len(classes), dtype="float32").unsqueeze(1)
    with job(pp=2, micro_batches=MICRO_BATCHES):
        model = pipeline(layers(), loss_fn=weighted)
        single = model._layers.single_model()
        model._layers.copy_to(single)
        loss = model.train_batch([inputs, (classes, weights)], sgd(model))
        expected = weighted(single(inputs), (classes, weights)) / MICRO_BATCHES
        assert abs(float(loss) - float(expected)) < 1e-5


def test_whole_logits_are_refused() -> None:
    with job(pp=2, micro_batches=MICRO_BATCHES):
        model = pipeline(layers(), loss_fn=VocabularyLoss())
        with pytest.raises(BoundaryError, match="compute_loss=True"):
            model.predict_batch(batch()[0])
        with pytest.raises(BoundaryError, match="compute_loss=True"):
            model.eval_batch([batch()[0], None])
        with pytest.raises(BoundaryError, match="compute_loss=True"):
            model.eval_batch(batch())
        assert float(model.eval_batch(batch(), compute_loss=True)) > 0


@pytest.mark.parametrize(
    ("entries", "schedule", "message"),
    [
        ([*layers(), nn.functional.relu], "1F1B", "last entry"),
        ([*layers()[:-1], VocabularyHead(HIDDEN, 1)], "1F1B", "2 classes or more"),
        ([*layers()[:-1], VocabularyHead(HIDDEN, 9, tied="x")], "1F1B", "key of a Vocabulary"),
        *((layers(), name, "one of FThenB, 1F1B") for name in ("ZBV", "VPP", "Hanayo")),
    ],
)
def test_what_cannot_be_built_is_refused(entries: Any, schedule: str, message: str) -> None:
    with job(pp=2, schedule=schedule), pytest.raises(ConfigError, match=message):
        pipeline(entries, loss_fn=VocabularyLoss())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_loss_of_whole_logits_is_refused(loss: Any) -> None:
    with job(pp=2), pytest.raises(ConfigError, match="loss_fn=VocabularyLoss"):
        pipeline(layers(), loss_fn=loss)


def test_a_loss_of_ones_own_of_whole_logits_is_told_what_to_use() -> None:
    def own(output: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(output, label)

    with job(pp=2, micro_batches=MICRO_BATCHES):
        model = pipeline(layers(), loss_fn=own)
        with pytest.raises(BoundaryError, match="begins with vocabulary_cross_entropy"):
            model.eval_batch(batch(), compute_loss=True)


def test_wrong_uses_of_the_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match="no bias"):
        VocabularyHead(2, 3, tied="words", bias_attr=None)
    with pytest.raises(ConfigError, match="'mean' or 'sum'"):
        VocabularyLoss(reduction="none")
    with pytest.raises(BoundaryError, match="VocabularyHead"):
        vocabulary_cross_entropy(paddle.zeros([2, 3]), paddle.zeros([2], "int64"))
    with pytest.raises(ConfigError, match="description"):
        VocabularyHead(2, 3)(paddle.zeros([2]))
    with pytest.raises(ConfigError, match="vocabulary="):
        VocabularyHead(HIDDEN, 11.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hidden="):
        VocabularyHead(0, VOCABULARY)


@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_a_label_that_is_no_class_is_refused_unless_it_is_ignored(label: int) -> None:
    inputs, labels = batch()
    labels[1] = label
    with job(pp=2, micro_batches=MICRO_BATCHES):
        model = pipeline(layers(), loss_fn=VocabularyLoss())
        state = bits(model._layers.full_state_dict())
        with pytest.raises(BoundaryError, match=f"label {label}"):
            model.train_batch([inputs, labels], sgd(model))
        assert bits(model._layers.full_state_dict()) == state
    with job(pp=2, micro_batches=MICRO_BATCHES):
        model = pipeline(layers(), loss_fn=VocabularyLoss(ignore_index=label))
        assert float(model.train_batch([inputs, labels], sgd(model))) > 0


def test_labels_are_whole_numbers() -> None:
    inputs, labels = batch()
    with job(pp=2, micro_batches=MICRO_BATCHES):
        model = pipeline(layers(), loss_fn=VocabularyLoss())
        with pytest.raises(BoundaryError, match="int64 or int32"):
            model.train_batch([inputs, labels.astype("float32")], sgd(model))


WORDS, WORD_WIDTH = 11, 8
#: Of the head's weights, tied or not.
NAMES = {False: "4.weight", True: "shared_layers.words.weight"}


def entries(tied: bool) -> list[Any]:
    blocks = [LayerDesc(nn.Linear, WORD_WIDTH, WORD_WIDTH) for _ in range(3)]
    if tied:
        head = VocabularyHead(WORD_WIDTH, WORDS, tied="words")
        return [VocabularyEmbedding("words", WORD_WIDTH, WORDS), *blocks, head]
    head = VocabularyHead(WORD_WIDTH, WORDS, bias_attr=None)
    return [LayerDesc(nn.Embedding, WORDS, WORD_WIDTH), *blocks, head]


def objects_of(model: Any) -> dict[str, Any]:
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    return {"model": model, "optimizer": fleet.distributed_optimizer(adam)}


def tensors(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_two_ranks_goes_to_four_and_to_one(tied: bool, tmp_path: Path) -> None:
    tokens, labels = (
        paddle.to_tensor(np.random.default_rng(seed).integers(0, WORDS, (8, 3)))
        for seed in range(2)
    )
    losses, written = [], []
    for ranks, source in ((2, None), (4, 2), (1, 4), (2, 1)):
        with job(ranks, 4):
            model = pipeline(entries(tied), loss_fn=VocabularyLoss())
            objects = objects_of(model)
            if source is None:
                model.train_batch([tokens, labels], objects["optimizer"])
            else:
                fleetpipe.CheckpointManager(tmp_path / str(source)).restore(**objects)
            folder = tmp_path / (str(ranks) if source != 1 else "again")
            fleetpipe.CheckpointManager(folder).save(1, **objects)
            written.append(tensors(folder))
            losses.append(float(model.train_batch([tokens, labels], objects["optimizer"])))
    assert written[0]
    assert all(one == written[0] for one in written)
    assert losses[0] == losses[-1]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_a_model_of_one_process_takes_the_checkpoint_of_another_number(tmp_path: Path) -> None:
    with job(4, 4):
        model = pipeline(entries(tied=False), loss_fn=VocabularyLoss())
        fleetpipe.CheckpointManager(tmp_path).save(1, model=model)
        expected = model.layers.full_state_dict()["4.weight"]
    with job(2, 4):
        single = pipeline(entries(tied=False), loss_fn=VocabularyLoss()).layers.single_model()
    fleetpipe.load_single(single, tmp_path)
    loaded = [single.state_dict()[f"{number}.weight"] for number in (4, 5)]
    assert [w.shape[0] for w in loaded] == [5, 6]
    assert paddle.concat(loaded).numpy().tobytes() == expected.numpy().tobytes()


def saved(ranks: int, load: str, tied: bool, folder: str) -> dict[str, bytes]:
    """Loads what others have saved in a folder, or trains; saves it, and returns the whole."""
    tokens = paddle.to_tensor(np.random.default_rng(0).integers(0, WORDS, (8, 3)))
    with job(ranks, 4):
        network = PipelineLayer(entries(tied), num_stages=ranks)
        model = fleetpipe.Model(network)
        adam = paddle.optimizer.AdamW(0.1, parameters=network.parameters())
        model.prepare(adam, VocabularyLoss())
        if load == "train":
            model.train_batch([tokens], [tokens])
        elif load == "dict":
            network.set_dict(paddle.load(f"{folder}/2.pdparams"))
        elif load == "folder":
            network.set_state_dir(f"{folder}/2")
        elif load == "file":
            model.load(f"{folder}/2")
        else:
            network.load_from(paddle.load(f"{folder}/1.pdparams"))
            single = network.single_model()
            single.load_dict(network.full_state_dict())
            network.load_from(single)
        network.save_state_dict(f"{folder}/{ranks}")
        model.save(f"{folder}/{ranks}")
        state = network.full_state_dict()
        assert state[NAMES[tied]].shape == [WORDS, WORD_WIDTH]
        return bits(state)


@pytest.mark.parametrize("tied", [False, True])
def test_files_have_the_whole_head_and_go_to_any_number_of_ranks(
    tied: bool, tmp_path: Path, on_ranks: Callable[..., Any]
) -> None:
    first, second = on_ranks(saved, 2, 2, "train", tied, str(tmp_path))
    assert first == second
    for ranks, load in ((4, "dict"), (3, "folder"), (1, "file"), (3, "source")):
        assert saved(ranks, load, tied, str(tmp_path)) == first, load
    two, one = (
        {key: paddle.load(str(tmp_path / f"{ranks}.{key}")) for key in ("pdparams", "pdopt")}
        for ranks in (2, 1)
    )
    assert [*two["pdparams"]] == [*one["pdparams"]]
    assert bits(two["pdopt"]) == bits(one["pdopt"])
    layers = {path.name for path in (tmp_path / "2").glob("layer_*")}
    assert layers == {f"layer_0{n}-tensor_00-model_states.pdparams" for n in range(5 - tied)}
    for path in layers:
        two, one = (paddle.load(str(tmp_path / ranks / path)) for ranks in "21")
        assert bits(two) == bits(one)

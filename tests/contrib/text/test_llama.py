"""The Llama of examples/llm: the plain model's bits, Hugging Face's names, paddle.inference."""

from __future__ import annotations

import copy
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

import fleetpipe
from fleetpipe import fleet
from fleetpipe.contrib.formats.convert import convert, read_checkpoint
from fleetpipe.contrib.formats.name_map import read_map
from fleetpipe.fleet.meta_parallel import PipelineLayer
from tests.contrib.sequences.test_attention import plain as plain_attention
from tests.launching import ROOT
from tests.pipelines import accumulate, job, sgd

sys.path.insert(0, str(ROOT / "examples" / "llm"))
import llama

VOCABULARY, LENGTHS = 40, (12, 20, 12, 16)
SIZES = {"width": 16, "heads": 4, "key_heads": 2, "perceptron": 24}


def batch(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    """[inputs, labels] of micro-batches of different lengths, with packed documents."""
    numbers = np.random.default_rng(seed)
    inputs, labels = [], []
    for length in lengths:
        ids, following = numbers.integers(0, VOCABULARY, (2, 2, length))
        documents = np.arange(length) >= numbers.integers(1, length, (2, 1))
        following[:, numbers.integers(1, length) :] = llama.IGNORED
        inputs.append((paddle.to_tensor(ids), paddle.to_tensor(documents.astype("int32"))))
        labels.append(paddle.to_tensor(following))
    return [inputs, labels]


def trained_plainly(model: Any, steps: int) -> tuple[list[float], dict[str, bytes]]:
    """The losses and the last gradients of a loop in plain Paddle; a loss is a mean over tokens."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    losses = []
    for step in range(steps):
        optimizer.clear_grad()
        inputs, labels = batch(step)
        counts = [int((one != llama.IGNORED).sum()) for one in labels]
        shares = [Fraction(count, sum(counts)) for count in counts]
        weighed = (
            llama.next_token_loss(model(*value), following) * share.numerator / share.denominator
            for value, following, share in zip(inputs, labels, shares)
        )
        losses.append(float(accumulate(weighed)))
        if step + 1 < steps:
            optimizer.step()
    return losses, {name: p.grad.numpy().tobytes() for name, p in model.named_parameters()}


@pytest.mark.parametrize("form", ["captured", "tied", "untied"])
def test_the_bits_are_those_of_the_plain_model(form: str) -> None:
    shape = llama.Shape(blocks=2, tied=form == "tied", **SIZES)
    with job(2, 4, loss_reduction="tokens"):
        paddle.seed(3)
        loss = {"loss_fn": llama.next_token_loss}
        if form == "captured":
            plain = llama.Llama(VOCABULARY, shape)
            example = batch(0, (12,))[0][0]
            pipe = fleetpipe.pipeline(copy.deepcopy(plain), example, verify=False, **loss)
        else:
            pipe = PipelineLayer(llama.llama_layers(VOCABULARY, shape), num_stages=2, **loss)
            layers = pipe.single_model()
            pipe.copy_to(layers)
            plain = paddle.nn.Layer()
            plain.layers = layers
            plain.forward = lambda *value: layers(value)
        model = fleet.distributed_model(pipe)
        optimizer = sgd(pipe)
        losses = [float(model.train_batch(batch(step), optimizer)) for step in range(2)]
        losses.append(float(model.forward_backward_pipeline(batch(2))))
        gradients = {name: p.grad.numpy() for name, p in pipe.named_parameters()}
    expected, plain_gradients = trained_plainly(plain, 3)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert form == "tied" or losses == expected
    assert len(gradients) == len(plain_gradients)
    for (name, gradient), other in zip(gradients.items(), plain_gradients.values()):
        if form == "tied":
            whole = np.frombuffer(other, "float32").reshape(gradient.shape)
            assert np.allclose(gradient, whole, rtol=1e-4, atol=1e-6), name
        else:
            assert gradient.tobytes() == other, name


def test_attention_is_that_of_one_softmax_over_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions need no new start in a document: what counts is how far two places are."""
    model = llama.Llama(VOCABULARY, llama.Shape(blocks=2, **SIZES))
    ids, documents = batch(0, (12,))[0][0]
    found = model(ids, documents).numpy()
    begin = int((documents[0] == 0).sum())
    alone = model(ids[:1, begin:], documents[:1, begin:]).numpy()
    assert np.allclose(found[0, begin:], alone[0], atol=1e-5)

    def attention(query: Any, key: Any, value: Any, documents: Any) -> Any:
        return plain_attention(query * (8 / query.shape[-1]) ** 0.5, key, value, True, documents)

    monkeypatch.setattr(llama.sequences, "attention", attention)
    assert np.allclose(model(ids, documents).numpy(), found, atol=1e-5)


def test_slices_of_packed_sequences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = paddle.zeros([1, 2, 2, 4])
    monkeypatch.setattr(llama.slices, "earlier", lambda layer: [(keys, keys)])
    attention = llama.Attention(llama.Shape(**SIZES))
    with pytest.raises(ValueError, match="slices of packed sequences"):
        attention(paddle.zeros([1, 2, 16]), paddle.zeros([1, 2], "int32"))


NAMES = str(ROOT / "examples" / "llm" / "hugging_face.json")


@pytest.mark.skipif(paddle.__version__.startswith("2."), reason="maps of names need Paddle 3.3")
@pytest.mark.parametrize("tied", [True, False])
def test_it_goes_to_hugging_face_and_back(tied: bool, tmp_path: Path) -> None:
    model, other = (llama.Llama(VOCABULARY, llama.Shape(**SIZES, tied=tied)) for _ in range(2))
    fleetpipe.CheckpointManager(tmp_path / "run").save(0, model=model)
    names = read_map(NAMES, reverse=True)
    convert(tmp_path / "run", tmp_path / "there", to="huggingface", names=names)
    there = read_checkpoint(tmp_path / "there", "huggingface", None).of("model")
    expected = {}
    for name, value in model.state_dict().items():
        array = value.numpy().T if "_proj" in name or "head" in name else value.numpy()
        expected[name if "head" in name else f"model.{name}"] = array.tobytes()
    assert {name: tensor.read().tobytes() for name, tensor in there.items()} == expected
    fleetpipe.load_checkpoint(tmp_path / "there", model=other, names=NAMES)
    for value, back in zip(model.state_dict().values(), other.state_dict().values()):
        assert back.numpy().tobytes() == value.numpy().tobytes()


def test_a_saved_function_computes_what_the_model_does(tmp_path: Path) -> None:
    model = llama.Llama(VOCABULARY, llama.Shape(**SIZES))
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, VOCABULARY, (2, 9)))
    expected = model(ids).numpy()
    model.eval()
    spec = InputSpec([None, None], "int64", "ids")
    saved = paddle.jit.to_static(model, input_spec=[spec], full_graph=True)
    paddle.jit.save(saved, str(tmp_path / "llama"))
    np.testing.assert_allclose(paddle.jit.load(str(tmp_path / "llama"))(ids), expected, atol=1e-6)

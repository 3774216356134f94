"""The Llama of examples/llm under Hugging Face's names, and saved for paddle.inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

import fleetpipe
from fleetpipe.contrib.formats.convert import convert, read_checkpoint
from fleetpipe.contrib.formats.name_map import read_map
from tests.contrib.text.test_llama import SIZES, VOCABULARY, llama
from tests.launching import ROOT

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

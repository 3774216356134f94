"""A Llama of Hugging Face in the library's pipeline and back, beside the definition of its forward.

The definition is written in NumPy after ``modeling_llama.py`` of transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.launching import run
from tests.libraries.models import MODELS, SIZES

HERE = Path(__file__).parent
NAMES = [name for name in MODELS if name.startswith("llama")]
Array = np.ndarray
HIDDEN, HEADS = SIZES["hidden_size"], SIZES["num_attention_heads"]


def made(tied: bool) -> dict[str, Array]:
    """Returns weights under Hugging Face's names and in its shapes."""
    inner, vocabulary = SIZES["intermediate_size"], SIZES["vocab_size"]
    wide = {f"self_attn.{one}_proj": (HIDDEN, HIDDEN) for one in "qkvo"}
    wide |= {"mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN)}
    wide |= {"mlp.down_proj": (HIDDEN, inner)}
    wide |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,))
    layers = range(SIZES["num_hidden_layers"])
    shapes = {f"model.layers.{n}.{one}": shape for n in layers for one, shape in wide.items()}
    shapes |= {"model.embed_tokens": (vocabulary, HIDDEN), "model.norm": (HIDDEN,)}
    shapes |= {} if tied else {"lm_head": (vocabulary, HIDDEN)}
    numbers = np.random.default_rng(2)
    weights = {
        f"{name}.weight": numbers.normal(len(shape) == 1, 0.1, shape).astype("float32")
        for name, shape in shapes.items()
    }
    # As early conversions have.
    inverse = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": frequencies() for n in layers}
    return {**weights, **inverse}


def frequencies() -> Array:
    size = HIDDEN // HEADS
    return (1.0 / 10000.0 ** (np.arange(0, size, 2) / size)).astype("float32")


def logits_of(weights: dict[str, Array], tokens: Array) -> Array:
    """The forward of ``LlamaForCausalLM``."""
    rows, length = tokens.shape

    def norm(x: Array, name: str) -> Array:
        return weights[f"{name}.weight"] * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def heads(x: Array) -> Array:
        return x.reshape(rows, length, HEADS, -1).transpose(0, 2, 1, 3)

    def rotated(x: Array) -> Array:
        angles = np.tile(np.outer(np.arange(length), frequencies()), 2)
        one, other = np.split(x, 2, axis=-1)
        return x * np.cos(angles) + np.concatenate([-other, one], -1) * np.sin(angles)

    x = weights["model.embed_tokens.weight"][tokens].astype("float64")
    for n in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{n}"
        w = {name.removeprefix(f"{at}."): one.T for name, one in weights.items() if at in name}
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (heads(h @ w[f"self_attn.{one}_proj.weight"]) for one in "qkv")
        scores = rotated(q) @ rotated(k).swapaxes(2, 3) / np.sqrt(HIDDEN // HEADS)
        scores = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        x = x + mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ w["self_attn.o_proj.weight"]
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = h @ w["mlp.gate_proj.weight"]
        gate = gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"])
        x = x + gate @ w["mlp.down_proj.weight"]
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each Llama has gone in by every way, and back."""
    folder = tmp_path_factory.mktemp("hugging-face")
    for name in NAMES:
        (folder / name / "hf").mkdir(parents=True)
        save_file(made("tied" in name), folder / name / "hf/model.safetensors")
    run(HERE / "worker.py", None, folder=folder, args=[str(folder), *NAMES])
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_weights_come_in_by_every_way_and_go_back(folder: Path, name: str) -> None:
    weights = made("tied" in name)
    found = np.load(folder / name / "paddle.npz")
    (file,) = (folder / name / "back").glob("*.safetensors")
    back = load_file(file)
    assert {*back} == {one for one in weights if "inv_freq" not in one}
    at_first, at_last = (logits_of(one, found["tokens"]) for one in (weights, back))
    for way in ("load_checkpoint", "convert", "safetensors", "pdparams"):
        assert abs(found[way] - at_first).max() < 1e-5, way
    for way in ("trained", "load_single"):
        assert abs(found[way] - at_last).max() < 1e-5, way
    # It was trained.
    assert abs(at_last - at_first).max() > 0.1

"""Checkpoints of Paddle, of libraries and of Hugging Face: any to any, bits equal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed import load_state_dict, save_state_dict
from safetensors.numpy import load_file

import fleetpipe
from fleetpipe.contrib.formats import distributed
from tests.contrib.formats.trainer_files import (
    arrays,
    convert,
    map_file,
    step,
    trained,
    write_unified,
)
from tests.launching import ROOT
from tests.pipelines import bits

NEW = paddle.__version__.startswith("3.")
pytestmark = pytest.mark.skipif(not NEW, reason="Paddle 2.6.2 writes no such metadata")
PLACES = ("fleetpipe", "formers", "distributed", "unified")


@pytest.mark.parametrize("source", PLACES)
def test_any_format_becomes_any_other_with_the_same_bits(
    unified: Path, tmp_path: Path, source: str
) -> None:
    convert(unified, tmp_path / "source", "--to", source)
    for target in PLACES:
        convert(tmp_path / "source", tmp_path / target, "--to", target)
        convert(tmp_path / target, tmp_path / f"{target}-back", "--to", "unified")
        assert arrays(tmp_path / f"{target}-back") == arrays(unified)
    index = json.loads((tmp_path / "unified/model.safetensors.index.json").read_text())
    assert [*index["weight_map"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert paddle.load(str(tmp_path / "unified/scheduler.pdparams"))["last_epoch"] == 7
    convert(tmp_path / "source", tmp_path / "layers", "--to", "fleet")
    convert(tmp_path / "layers", tmp_path / "alone", "--to", "huggingface")
    model = {name: one for name, one in arrays(unified).items() if name.startswith("model ")}
    assert arrays(tmp_path / "alone") == model


def test_training_goes_on_from_a_trainers_checkpoint(unified: Path, tmp_path: Path) -> None:
    straight, adam = trained()
    step(straight, adam)
    for file in unified.glob("master_weights*"):
        file.unlink()
    convert(unified, tmp_path / "run")
    model, other = trained()
    assert fleetpipe.load_single(model, tmp_path / "run", optimizer=other) == 7
    for one in ((straight, adam), (model, other)):
        step(*one)
    assert bits(model.state_dict()) == bits(straight.state_dict())


def test_what_paddle_saves_is_read_and_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "SHARD_BYTES", 100)
    dtypes = ["float32", "float16", "bfloat16", "int64", "bool", "uint8", "float64"]
    state = {dtype: paddle.arange(12).reshape([3, 4]).astype(dtype) for dtype in dtypes}
    state["scalar"] = paddle.to_tensor(2.5)
    # A dict in a dict, and what only looks like the state of an optimizer.
    state["inner"] = {"bias.moment1_0": paddle.ones([2])}
    save_state_dict(state, str(tmp_path / "paddle"))
    convert(tmp_path / "paddle", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "again", "--to", "distributed")
    assert len([*(tmp_path / "again").glob("*.distcp")]) > 2
    flat = {**state, "inner.bias.moment1_0": state.pop("inner")["bias.moment1_0"]}
    del flat["inner"]
    loaded = {name: paddle.zeros_like(value) for name, value in flat.items()}
    load_state_dict(loaded, str(tmp_path / "again"))
    assert bits(loaded) == bits(flat)


def save_part(folder: Path, rank: int, gather: Callable[..., None]) -> None:
    """Saves as one of two ranks does: rows of one tensor, and a flat part of another."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    piece = slice(7 * rank, 7 + 8 * rank)
    rows = paddle.arange(12.0).reshape([4, 3])[2 * rank : 2 * rank + 2]
    name, flat = "rows.moment1_0", paddle.arange(15.0)[piece]
    state = {
        "rows": ShardedWeight("rows", rows, (2, 3), (4, 3), (2 * rank, 0)),
        name: ShardedWeight(name, flat, (5, 3), (5, 3), (0, 0), True, piece),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paddle.distributed, "get_world_size", lambda *_: 2)
        patched.setattr(paddle.distributed, "get_rank", lambda *_: rank)
        patched.setattr(paddle.distributed, "all_gather_object", gather)
        save_state_dict(state, str(folder), process_group=object())


def save_parts(folder: Path) -> None:
    """Saves as two ranks do, after a first run that records what they gather of each other."""
    told: list[list[Any]] = [[], []]
    for rank, values in enumerate(told):

        def record(gathered: list[Any], value: Any, *_: Any, to: list[Any] = values) -> None:
            to.append(value)
            gathered.append(value)

        save_part(folder / "recorded", rank, record)
    for rank in range(2):
        calls = zip(*told)

        def gather(gathered: list[Any], *_: Any, of: Iterator[Any] = calls) -> None:
            gathered.extend(next(of))

        save_part(folder / "parts", rank, gather)


def test_parts_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    save_parts(tmp_path)
    assert len([*(tmp_path / "parts").glob("*.distcp")]) == 2
    convert(tmp_path / "parts", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "whole", "--to", "distributed")
    convert(tmp_path / "whole", tmp_path / "unified", "--from", "distributed", "--to", "unified")
    (file,) = (tmp_path / "unified").glob("model-*")
    assert np.array_equal(load_file(file)["rows"], np.arange(12.0).reshape(4, 3))
    state = {"rows.moment1_0": paddle.zeros([5, 3])}
    load_state_dict(state, str(tmp_path / "whole"))
    assert state["rows.moment1_0"].tolist() == np.arange(15.0).reshape(5, 3).tolist()


def model_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model-00001-of-00001.safetensors")


def llama() -> dict[str, np.ndarray]:
    """The names of Hugging Face, and sizes that are all different."""
    numbers = np.random.default_rng(1)
    shapes = {"self_attn.q_proj": (6, 5), "self_attn.k_proj": (4, 5), "self_attn.v_proj": (4, 5)}
    shapes.update({"self_attn.o_proj": (5, 6), "mlp.gate_proj": (7, 5), "mlp.up_proj": (7, 5)})
    shapes.update({"mlp.down_proj": (5, 7), "input_layernorm": (5,)})
    shapes["post_attention_layernorm"] = (5,)
    names = {f"model.layers.{n}.{name}": shape for n in range(11) for name, shape in shapes.items()}
    names.update({"model.embed_tokens": (9, 5), "model.norm": (5,), "lm_head": (9, 5)})
    return {
        f"{name}.weight": numbers.standard_normal(shape).astype("float32")
        for name, shape in names.items()
    }


def test_a_llama_of_hugging_face_is_one_of_paddlenlp(tmp_path: Path) -> None:
    theirs = llama()
    moments = {f"{name}/moment1_0": array + 1 for name, array in theirs.items()}
    powers = {f"{name}/beta1_pow_acc_0": np.ones(1, "float32") for name in theirs}
    source = write_unified(tmp_path / "hf", {"model": theirs, "optimizer": {**moments, **powers}})
    convert(source, tmp_path / "nlp", "--to", "unified", "--names", "paddlenlp-llama")
    model = model_of(tmp_path / "nlp")
    optimizer = load_file(tmp_path / "nlp/optimizer-00001-of-00001.safetensors")
    query = theirs["model.layers.10.self_attn.q_proj.weight"].T
    assert np.array_equal(model["llama.layers.10.self_attn.q_proj.weight"], query)
    assert np.array_equal(model["lm_head.weight"], theirs["lm_head.weight"].T)
    assert np.array_equal(model["llama.norm.weight"], theirs["model.norm.weight"])
    moment = optimizer["llama.layers.10.self_attn.q_proj.weight/moment1_0"]
    assert np.array_equal(moment, query + 1)
    words = ("--names", "paddlenlp-llama", "--reverse-names")
    convert(tmp_path / "nlp", tmp_path / "back", "--to", "unified", *words)
    assert arrays(tmp_path / "back") == arrays(source)


def test_names_of_layers_of_a_list_are_names_of_a_map(unified: Path, tmp_path: Path) -> None:
    statements = ["$LAYER_ID.weight^T -> h.$LAYER_ID.w", "$LAYER_ID.bias -> h.$LAYER_ID.b"]
    words = ("--to", "unified", "--names", map_file(tmp_path, *statements))
    convert(unified, tmp_path / "there", *words)
    shapes = {name: array.shape for name, array in model_of(tmp_path / "there").items()}
    assert shapes == {"h.0.w": (3, 4), "h.0.b": (3,), "h.2.w": (2, 3), "h.2.b": (2,)}
    convert(tmp_path / "there", tmp_path / "back", *words, "--reverse-names")
    assert arrays(tmp_path / "back") == arrays(unified)


@pytest.mark.parametrize("words", [(), ("--reverse-names",)])
def test_a_map_swaps_two_names_by_a_third(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Of each layer; beside experts of no layer."""
    swapped = {"h.0.gate": "h.0.up", "h.10.gate": "h.10.up", "h.0.up": "h.0.gate",
               "h.10.up": "h.10.gate", "experts.3.w": "experts.3.w"}  # fmt: skip
    model = {name: np.array([n], "float32") for n, name in enumerate(swapped)}
    source = write_unified(tmp_path / "hf", {"model": model})
    gate, up, third = (f"h.$LAYER_ID.{name}" for name in ("gate", "up", "third"))
    experts = "experts.$EXPERT_ID.w -> experts.$EXPERT_ID.w"
    swap = (f"{gate} -> {third}", f"{up} -> {gate}", f"{third} -> {up}")
    names = map_file(tmp_path, *swap, experts)
    convert(source, tmp_path / "new", "--to", "huggingface", "--names", names, *words)
    assert model_of(tmp_path / "new") == {n: model[other] for n, other in swapped.items()}


def test_fused_tensors_are_split_and_joined(tmp_path: Path) -> None:
    fused = np.arange(24, dtype="float32").reshape(4, 6)
    source = write_unified(tmp_path / "hf", {"model": {"h.0.c_attn": fused, "unused": fused}})
    statement = "h.$LAYER_ID.c_attn -> q.$LAYER_ID, k.$LAYER_ID, v.$LAYER_ID, axis=1"
    words = ("--to", "huggingface", "--names", tmp_path / "names.json")
    map_file(tmp_path, statement, "unused -> _")
    convert(source, tmp_path / "split", *words)
    split = {name: array.tolist() for name, array in model_of(tmp_path / "split").items()}
    assert split == {
        f"{part}.0": fused[:, 2 * n : 2 * n + 2].tolist() for n, part in enumerate("qkv")
    }
    map_file(tmp_path, statement)
    convert(tmp_path / "split", tmp_path / "join", *words, "--reverse-names")
    assert np.array_equal(model_of(tmp_path / "join")["h.0.c_attn"], fused)


def test_the_map_of_the_page_works_on_a_model_that_it_speaks_of(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    names = tmp_path / "names.json"
    names.write_text(page.split("```json\n")[1].split("```")[0])
    array = np.arange(12, dtype="float32").reshape(2, 6)
    model = {"embed.weight": array, "norm": array[0].astype("float16"), "lm_head.weight": array}
    expected = {"0.weight": array, "final.weight": array[0], "9.weight": array.T}
    for layer in range(2):
        of_layer = {"up.weight": array + layer, "qkv": array - layer, "rotary": array}
        model.update((f"layers.{layer}.{name}", one) for name, one in of_layer.items())
        expected[f"up.{layer}.weight"] = (array + layer).T
        for part, name in enumerate("qkv"):
            expected[f"{name}.{layer}"] = array[:, 2 * part : 2 * part + 2] - layer
    source = write_unified(tmp_path / "hf", {"model": model})
    convert(source, tmp_path / "new", "--to", "huggingface", "--names", names)
    read = model_of(tmp_path / "new")
    assert {name: one.tolist() for name, one in read.items()} == {
        name: one.tolist() for name, one in expected.items()
    }
    assert str(read["final.weight"].dtype) == "float32"


def numbers() -> dict[str, Any]:
    """Every number of the half precisions, and many of float32; by dtype."""
    halves = np.arange(1 << 16, dtype="uint32")
    # At, beside and halfway between numbers of bfloat16, and around the least of float16.
    near = [(halves << 16) + part for part in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x1001)]
    floats = np.concatenate([*near, halves + 0x33000000]).astype("uint32").view("float32")
    brains = (halves << 16).view("float32")
    # Of these paddle.cast makes wrong numbers of float16: it shifts by more bits than there are.
    for array in (floats, brains):
        array[(abs(array) > 1.6e-27) & (abs(array) < 6.7e-24)] = 0
    words = (brains.view("uint32") >> 16).astype("uint16")
    tensors = {"float32": paddle.to_tensor(floats)}
    for name, bits_of in (("float16", halves.astype("uint16")), ("bfloat16", words)):
        tensors[name] = paddle.to_tensor(bits_of.view("int16")).view(name)
    return tensors


def test_a_map_casts_as_paddle_does(tmp_path: Path) -> None:
    tensors = {f"{name}.w": tensor.reshape([-1, 4]) for name, tensor in numbers().items()}
    moments = {f"{name}.moment1_0": tensor for name, tensor in tensors.items()}
    save_state_dict({**tensors, **moments}, str(tmp_path / "paddle"))
    for source, target in itertools.permutations(("float32", "float16", "bfloat16"), 2):
        statements = [f"{source}.w^T -> t", f"t -> cast, dtype='{target}'"]
        statements += [f"{name} -> _" for name in tensors if name != f"{source}.w"]
        names = map_file(tmp_path, *statements)
        out = tmp_path / f"{source}-{target}"
        convert(tmp_path / "paddle", out, "--to", "distributed", "--names", names)
        whole = tensors[f"{source}.w"].T.contiguous()
        expected = {"cast": whole.astype(target), "cast.moment1_0": whole}
        loaded = {name: paddle.zeros_like(value) for name, value in expected.items()}
        load_state_dict(loaded, str(out))
        assert bits(loaded) == bits(expected), (source, target)

"""Checkpoints, maps of names and targets that are refused: by name, and nothing is left."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import fleetpipe
from fleetpipe.checkpoint.files import tensors
from fleetpipe.contrib.formats import distributed
from fleetpipe.errors import CheckpointError
from tests.contrib.formats.trainer_files import (
    arrays,
    convert,
    map_file,
    refused,
    trained,
    write_unified,
)

NEW = paddle.__version__.startswith("3.")
pytestmark = pytest.mark.skipif(not NEW, reason="Paddle 2.6.2 writes no such metadata")


def test_no_other_dtype_is_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_unified(tmp_path / "hf", {"model": {"a": np.arange(3)}})
    names = map_file(tmp_path, "a -> b, dtype='float16'")
    refusal = refused(capsys, source, tmp_path / "new", "--names", names)
    assert "'a' cannot be cast from int64 to float16" in refusal


def test_damage_is_refused_with_the_name_of_the_file(
    unified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(unified, tmp_path / "flat", "--to", "distributed")
    model, index = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
    places = json.loads((unified / index).read_text())
    moved = {"weight_map": {**places["weight_map"], "2.bias": "gone.safetensors"}}
    lost = {"weight_map": dict.fromkeys(("0.weight", "0.bias", "2.weight"), model)}
    extra = {"weight_map": {**places["weight_map"], "3.bias": model}}
    outside = {"weight_map": {**places["weight_map"], "2.bias": f"../unified-0/{model}"}}
    cases: list[tuple[Path, bytes, str]] = [
        (unified / model, (unified / model).read_bytes()[:-4], model),
        (unified / index, b"{", index),
        (unified / index, json.dumps(moved).encode(), "gone.safetensors cannot be read"),
        (unified / index, json.dumps(lost).encode(), "no place for 2.bias"),
        (unified / index, json.dumps(extra).encode(), "no tensor '3.bias'"),
        (unified / index, json.dumps(outside).encode(), "names of files of the folder"),
    ]
    flat = tmp_path / "flat"
    shard = flat / "0_0.distcp"
    content = pickle.loads(shard.read_bytes())
    name, first = "0.weight", content["0.weight"]
    cases += [
        (shard, shard.read_bytes()[:-40], "0_0.distcp is not what paddle.save writes"),
        (shard, pickle.dumps({**content, name: first[:-1]}, 4), "0.metadata says [4, 3]"),
        (shard, pickle.dumps({**content, name: first.astype("float64")}, 4), "parts of float64"),
        (shard, pickle.dumps({"0.bias": content["0.bias"]}, 4), "no '0.weight'"),
        (flat / "0.metadata", pickle.dumps(print), "nothing of it was run"),
        (flat / "0.metadata", (flat / "0.metadata").read_bytes()[:-99], "0.metadata is not"),
    ]
    for path, damage, message in cases:
        whole = path.read_bytes()
        path.write_bytes(damage)
        assert message in refused(capsys, path.parent, tmp_path / "new", "--to", "unified")
        path.write_bytes(whole)
    shard.rename(flat / "other")
    assert "there is no" in refused(capsys, flat, tmp_path / "new", "--to", "unified")
    (flat / "0.metadata").rename(flat / "other.metadata.part")
    (flat / "other").rename(shard)
    assert "its save did not end" in refused(capsys, flat, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not [*tmp_path.glob(".draft-*")]


def test_misuse_says_what_to_do(
    unified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(unified, tmp_path / "there", "--to", "unified")
    before = arrays(tmp_path / "there")
    assert "nothing is written over" in refused(
        capsys, unified, tmp_path / "there", "--to", "distributed"
    )
    assert arrays(tmp_path / "there") == before
    convert(unified, tmp_path / "run", "--step", 5)
    assert "--step 6, or another" in refused(capsys, unified, tmp_path / "run", "--step", 5)
    new = tmp_path / "new"
    assert "one file *.metadata" in refused(capsys, unified, new, "--from", "distributed")
    assert "--from or source_format= says its format" in refused(capsys, tmp_path / "nowhere", new)
    names = map_file(tmp_path, "0.weight -> a")
    told = refused(capsys, unified, new, "--names", names)
    assert "does not speak of 3 tensors" in told
    assert "0.bias, 2.bias, 2.weight" in told
    map_file(tmp_path, "0.weight -> a", "2.weight -> a", "0.bias -> b", "2.bias -> c")
    assert "nothing is made of 0.weight" in refused(capsys, unified, new, "--names", names)
    map_file(tmp_path, "missing -> a")
    assert "lacks tensors" in refused(capsys, unified, new, "--names", names)
    names.write_text('{"statements": []}')
    assert str(names) in refused(capsys, unified, new, "--names", names)
    assert "paddlenlp-llama" in refused(capsys, unified, new, "--names", "llama")
    map_file(tmp_path, "0.weight -> ../../a")
    assert "does not fit" in refused(capsys, unified, new, "--names", names)
    assert "did not end" in refused(capsys, unified, names / "inner", "--to", "unified")
    for target in (names, unified):
        assert "nothing is written over" in refused(capsys, unified, target)
    assert not new.exists()


def test_folders_of_which_a_part_would_be_lost_are_refused(
    unified: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert(unified, tmp_path / "flat", "--to", "distributed")
    mixed, new = shutil.copytree(unified, tmp_path / "mixed"), tmp_path / "new"
    shutil.copytree(tmp_path / "flat", mixed, dirs_exist_ok=True)
    assert "several checkpoints" in refused(capsys, mixed, new)
    convert(mixed, tmp_path / "chosen", "--from", "unified", "--to", "unified")
    assert arrays(tmp_path / "chosen") == arrays(unified)
    for group in ("optimizer", "model"):
        (unified / f"{group}.safetensors.index.json").unlink()
        assert f"there is no {group}.safetensors.index.json" in refused(capsys, unified, new)
    full = OSError(errno.ENOSPC, "No space left on device")
    for to in ("fleetpipe", "distributed", "unified"):
        with monkeypatch.context() as patched:
            patched.setattr(tensors, "write", raising(full))
            patched.setattr(distributed, "_save", raising(full))
            words = (tmp_path / "flat", new, "--to", to)
            assert "No space left on device" in refused(capsys, *words)
        assert not new.exists()


def raising(error: Exception) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error

    return act


@pytest.mark.parametrize(
    "begins",
    [((0, 0), (0, 0)), ((0, 0), (1, 0)), ((-2, 0), (2, 0)), ((0,), (2,))],
    ids=["one part twice", "a hole", "before the begin", "of another axis count"],
)
def test_parts_that_leave_a_hole_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], begins: tuple[tuple[int, ...], ...]
) -> None:
    from paddle.distributed.flex_checkpoint.dcp.metadata import (
        LocalTensorIndex,
        LocalTensorMetadata,
        Metadata,
    )

    size, files = (2, 3), {}
    for number, begin in enumerate(begins):
        file = f"{number}_0.distcp"
        files[LocalTensorIndex("w", begin, local_shape=size)] = file
        paddle.save({"w": paddle.ones(size)}, str(tmp_path / "parts" / file))
    parts = [LocalTensorMetadata(begin, size, "float32", (4, 3)) for begin in begins]
    paddle.save(Metadata({"w": parts}, files, {}), str(tmp_path / "parts/0.metadata"))
    refusal = refused(capsys, tmp_path / "parts", tmp_path / "new")
    assert "0.metadata is damaged" in refusal
    assert "not the whole of 'w', float32 of shape [4, 3]" in refusal


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["0.weight -> 2.weight", "2.weight -> 0.weight"], "before they read its own"),
        (["0.weight, 2.weight -> a, axis=0"], "shapes cannot be joined"),
        (["0.weight -> a, permute='[0,0]'"], "no order of the axes of '0.weight'"),
        (["0.weight -> a.$STAGE"], "unknown placeholder"),
        (["0.weight -> _", "0.bias -> _", "2.weight -> _", "2.bias -> _"], "does not leave out"),
    ],
)
def test_maps_that_lose_or_mix_tensors_are_refused(
    unified: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    statements: list[str],
    words: str,
) -> None:
    rest = [n for n in ("0.bias", "2.weight", "2.bias") if not any(n in s for s in statements)]
    names = map_file(tmp_path, *statements, *(f"{n} -> {n}" for n in rest))
    refusal = refused(capsys, unified, tmp_path / "new", "--names", names)
    assert words in refusal
    assert str(names) in refusal or "leave out" in words
    assert not (tmp_path / "new").exists()


def test_names_and_places_that_cannot_be_written_are_refused(
    unified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, index = tmp_path / "new", unified / "model.safetensors.index.json"
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for to, target in (("unified", tmp_path / "link"), ("fleetpipe", tmp_path / "link")):
        assert "nothing is written over" in refused(capsys, unified, target, "--to", to)
    for to, target in (("unified", unified / "a/new"), ("fleetpipe", unified / "new")):
        assert "is within the source" in refused(capsys, unified, target, "--to", to)
    assert "0 or more (=-3)" in refused(capsys, unified, new, "--step", "-3")
    assert "did not end" in refused(capsys, unified, new, "--step", "1" * 300)
    assert sorted(tmp_path.rglob("*")) == before
    convert(unified, tmp_path / "layers", "--to", "fleet")
    first = "layer_00-tensor_00-model_states.pdparams"
    second = first.replace("-tensor", "-virtual_pp_stage_00-tensor")
    shutil.copy(tmp_path / "layers" / first, tmp_path / "layers" / second)
    assert second in refused(capsys, tmp_path / "layers", new)
    model = unified / "model-00001-of-00001.safetensors"
    places = json.loads(index.read_text())["weight_map"]
    for wrong in ({}, {**places, "2.bias": "a\0b"}):
        index.write_text(json.dumps({"weight_map": wrong}))
        assert index.name in refused(capsys, unified, new)
    index.write_text(json.dumps({"weight_map": places}))
    for old, other in ((b'"2.bias"', b'"\\ud800"'), (b'"F32"', b'"U32"')):
        whole = model.read_bytes()
        model.write_bytes(whole.replace(old, other, 1))
        assert f"{model.name} is damaged" in refused(capsys, unified, new)
        model.write_bytes(whole)


def test_the_formats_of_others_are_loaded_by_load_checkpoint(unified: Path, tmp_path: Path) -> None:
    model, _ = trained()
    for to in ("fleet", "formers", "distributed", "unified", "huggingface"):
        convert(unified, tmp_path / to, "--to", to)
        with pytest.raises(CheckpointError, match=r"fleetpipe.load_checkpoint loads what other"):
            fleetpipe.load_single(model, tmp_path / to)
        with pytest.raises(CheckpointError, match=r"fleetpipe.load_checkpoint loads what other"):
            fleetpipe.CheckpointManager(tmp_path / to).restore(model=model)
    (file,) = unified.glob("model-*.safetensors")
    with pytest.raises(CheckpointError, match=r"no such folder(.|\n)*got: a file"):
        fleetpipe.load_checkpoint(file, model=model)

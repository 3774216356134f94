"""Saved files from anywhere: what Paddle wrote is read bit by bit, all else is refused."""

from __future__ import annotations

import collections
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet_files
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet_files import manifest
from fleetpipe.fleet_files import states as state_files

FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64"]
DTYPES = [*FLOATS, "int8", "uint8", "int16", "int32", "int64", "bool"]
PROTOCOLS = [2, 3, 4]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pdparams"


def assert_equal(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, paddle.Tensor):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()
    elif isinstance(theirs, dict):
        assert type(mine) is dict
        assert list(mine) == list(theirs)
        for key in theirs:
            assert_equal(mine[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert (type(mine), len(mine)) == (type(theirs), len(theirs))
        for one, other in zip(mine, theirs):
            assert_equal(one, other)
    else:
        assert (type(mine), mine) == (type(theirs), theirs)


def states() -> dict[str, Any]:
    """What people save: a layer's state, an optimizer's with a scheduler's, mixtures."""
    net = paddle.nn.Sequential(paddle.nn.Linear(4, 3), paddle.nn.BatchNorm1D(3))
    warm = paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.NoamDecay(4, 3), 5, 0.0, 0.1)
    adam = paddle.optimizer.AdamW(warm, parameters=net.parameters())
    net(paddle.randn([3, 4])).mean().backward()
    adam.step()
    plateau = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    plateau.step(np.float32(2))
    tensor = paddle.randn([2, 2])
    transposed = np.asfortranarray(np.arange(6, dtype="float32").reshape(2, 3))
    return {
        "layer": net.state_dict(),
        "optimizer": adam.state_dict(),
        "master weights": {
            "moment": paddle.ones([2, 2]),
            "master_weights": {"w": paddle.randn([3])},
            "LR_Scheduler": plateau.state_dict(),
        },
        "nested": {
            "a": [paddle.ones([2]), (1, -2.5, None, True, 10**30), [], ()],
            "b": collections.OrderedDict(c=paddle.zeros([0, 3]), d={1: "e"}),
            "scalar": paddle.to_tensor(3.0),
            "twice": [tensor, tensor],
        },
        "dtypes": {name: paddle.ones([2]).astype(name) for name in DTYPES},
        "arrays": {"transposed": transposed, "swapped": np.arange(3, dtype=">i4")},
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_paddle_saved_is_what_paddle_loads(path: Path, protocol: int) -> None:
    for state in states().values():
        paddle.save(state, str(path), protocol=protocol)
        swapped = "swapped" in state
        expected: Any = paddle.load(str(path), return_numpy=swapped)
        if not swapped:
            assert_equal(fleet_files.load(path), expected)
            continue
        for name, array in fleet_files.arrays(path).items():
            np.testing.assert_array_equal(array, state[name])


def test_tensors_that_paddle_divided_are_put_together(path: Path) -> None:
    whole = np.arange(6, dtype="float32").reshape(2, 3)
    parts = {"w@@.0": whole.ravel()[:4], "w@@.1": whole.ravel()[4:]}
    about = {"w": {"OriginShape": (2, 3), "slices": list(parts)}}
    contents = {**parts, "UnpackBigParamInfor@@": about, "StructuredToParameterName@@": {"w": "p"}}
    path.write_bytes(pickle.dumps(contents, protocol=2))
    assert list(fleet_files.arrays(path)) == ["w"]
    np.testing.assert_array_equal(fleet_files.arrays(path)["w"], whole)


def test_a_static_tensor_comes_without_eval(path: Path) -> None:
    class Dense:
        def __reduce__(self) -> Any:
            return eval, ("data", {"data": np.arange(3)})

    path.write_bytes(pickle.dumps({"w": Dense()}))
    np.testing.assert_array_equal(fleet_files.arrays(path)["w"], np.arange(3))


class Calls:
    """Pickles to a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


def touching(path: Path) -> dict[str, bytes]:
    """Pickles that make a file where they are run, by every road known, and what each is."""
    word = f"touch {path}"
    reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float32(1).__reduce__()[0]
    dtype = np.dtype("O")
    objects = Calls(reconstruct, np.ndarray, (0,), b"b", state=(1, (1,), dtype, False, [1]))
    text = f"{word}'\ntR."
    named = {
        "a call": Calls(os.system, word),
        "eval": Calls(eval, f"__import__('os').system({word!r})"),
        "eval as Paddle's": Calls(eval, "data", {"data": Calls(os.system, word)}),
        "eval of Paddle's with another expression": Calls(
            eval, f"__import__('os').system({word!r})", {"data": np.zeros(1)}
        ),
        "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "a state": Calls(collections.OrderedDict, state={"__setstate__": os.system}),
        "a partial": Calls(Calls, os.system, state=word),
        "an encoding": Calls(__import__("codecs").encode, "x", f"{word}"),
        "a scalar of an object": Calls(scalar, dtype, pickle.dumps(Calls(os.system, word))),
        "an array of objects": objects,
        "a tuple of what is called": Calls(tuple, [Calls(os.system, word)]),
        "a map": Calls(tuple, [Calls(map, os.system, [word])]),
        "a layer": Calls(paddle.nn.Linear, 2, 2),
    }
    raw = {
        "protocol 0": f"cos\nsystem\n(S'{text}".encode(),
        "INST": f"(S'{word}'\nios\nsystem\n.".encode(),
        "OBJ": f"(cos\nsystem\nS'{word}'\no.".encode(),
        "NEWOBJ": b"\x80\x02cos\nsystem\n(U\x01xt\x81.",
        "an extension of copyreg": b"\x80\x02\x82\x01.",
        "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "a stacked name": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "a name left": b"\x80\x02}X\x01\x00\x00\x00acnumpy\nndarray\ns.",
        "a state of a function": b"\x80\x02cnumpy\ndtype\n}b.",
        "a state of a class": b"\x80\x02ccollections\nOrderedDict\n}b.",
    }
    return {name: pickle.dumps({"w": value}, 4) for name, value in named.items()} | raw


def test_no_pickle_runs_anything(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    for name, contents in touching(trace).items():
        path.write_bytes(contents)
        with pytest.raises(CheckpointError, match="nothing of it was run or loaded"):
            fleet_files.load(path)
        assert not trace.exists(), name
    path.write_bytes(pickle.dumps({"w": Calls(os.system, "true")}))
    with pytest.raises(CheckpointError, match=r"it holds the name 'posix\.system'"):
        fleet_files.load(path)


def number(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, "little")


def test_what_a_file_claims_takes_no_memory(path: Path) -> None:
    state = (1, (25, 10**9), np.dtype("f4"), False, b"1234")
    array = Calls(np.zeros(1).__reduce__()[0], np.ndarray, (0,), b"b", state=state)
    laughs: list[Any] = [1]
    for _ in range(60):
        laughs = [laughs] * 10
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    cycle: list[Any] = []
    cycle.append(cycle)
    # Each is found first in the outermost one, where it is not deep.
    chain: list[Any] = [[]]
    for _ in range(300):
        chain.append([chain[-1]])
    claims = [
        pickle.dumps({"w": array}),
        b"\x80\x04\x8e" + number(100 << 30, 8) + b"1.",
        b"\x80\x04\x8e" + number(2**64 - 1, 8) + b"1.",
        b"\x80\x04\x95" + number(100 << 30, 8) + b"N.",
        b"\x80\x02Nr" + number(2**32 - 1) + b".",
        b"\x80\x02})" + b"\x85" * 2 * 10**5 + b"Ns.",  # tuples in each other as a key of a dict
        b"\x80\x02})" + b"\x85" * 2 * 10**5 + b".",
        b"\x80\x02cnumpy\ndtype\n)" + b"\x85" * 2 * 10**5 + b"R.",
        b"\x80\x04\x8c\x01a" + b"\x96" + number(100 << 30, 8) + b"1.",
        pickle.dumps({"w": chain}),
        pickle.dumps({"w": chain[::-1]}),
        pickle.dumps({"w": nested}),
        pickle.dumps({"w": cycle}),
    ]
    for contents in claims:
        path.write_bytes(contents)
        with pytest.raises(CheckpointError):
            fleet_files.load(path)
    path.write_bytes(pickle.dumps({"w": laughs}))
    assert len(fleet_files.load(path)["w"]) == 10


def test_a_shape_that_no_array_has_is_refused_before_it_is_multiplied(path: Path) -> None:
    array = pickle.dumps({"w": np.zeros(1, "f4")}, protocol=2)
    shape = b"K\x01\x85"
    assert array.count(shape) == 1
    path.write_bytes(array)
    assert fleet_files.load(path)["w"].shape == [1]
    for sizes in (b"K\x01" * 33, (b"\x8a\xff" + b"\x7f" * 255) * 40):
        path.write_bytes(array.replace(shape, b"(" + sizes + b"t"))
        with pytest.raises(CheckpointError, match="it holds an array without a shape"):
            fleet_files.load(path)


@pytest.mark.parametrize("name", ["a\0b", "../a", "\ud800", "a" * 5000])
def test_a_manifest_of_layers_names_files_of_its_folder(name: str, tmp_path: Path) -> None:
    content = {"save": "1", "writers": 1, "files": {name: "digest"}}
    (tmp_path / "manifest-000.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="expected: names of files of the folder"):
        manifest.newest_save_in(tmp_path)
    (tmp_path / "manifest-000.json").write_text(json.dumps({**content, "save": "\ud800"}))
    with pytest.raises(CheckpointError, match=r"expected: (a text|names of files)"):
        manifest.newest_save_in(tmp_path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "it is empty"),
        (b"a letter to a friend", "begins with b'a letter to a friend'"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "`git lfs pull`"),
        (b"\x93NUMPY", "a single array"),
        (pickle.dumps([1, 2]), "it holds a list, not a dict"),
        (pickle.dumps({"a": 1}) + b"1", "more bytes after its end"),
        (pickle.dumps({"a": 1})[:-3], "a pickle"),
        (pickle.dumps({(1, 2): 1}), "a dict whose keys are neither names nor numbers"),
    ],
)
def test_what_a_file_seems_to_be(path: Path, contents: bytes, message: str) -> None:
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"model\.pdparams is not what paddle") as found:
        fleet_files.load(path)
    assert message in str(found.value)


def test_what_is_no_file_or_may_not_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*model\.pdparams"):
        fleet_files.load(path)
    with pytest.raises(CheckpointError, match="is no file"):
        fleet_files.load(path.parent)
    os.mkfifo(path.with_suffix(".fifo"))
    with pytest.raises(CheckpointError, match="is no file"):
        fleet_files.load(path.with_suffix(".fifo"))
    path.write_bytes(b"1")

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)  # a test may run as root, who may read anything
    with pytest.raises(CheckpointError, match=r"cannot be read[\s\S]*Permission denied"):
        fleet_files.load(path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_damaged_file_is_refused_or_has_other_numbers(path: Path, protocol: int) -> None:
    numbers = random.Random(protocol)
    paddle.save(states()["nested"], str(path), protocol=protocol)
    whole = path.read_bytes()
    refused = 0
    for turn in range(100):
        damaged = bytearray(whole)
        if turn % 4 == 0:
            del damaged[numbers.randrange(len(whole)) :]
        else:
            damaged[numbers.randrange(len(whole))] ^= 1 << numbers.randrange(8)
        path.write_bytes(damaged)
        try:
            fleet_files.load(path)
        except CheckpointError:
            refused += 1
        else:
            assert turn % 4, "a part of a file was taken for the whole"
    assert refused >= 50


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pdparams"
    fleet_files.save(path, {"a": paddle.ones([2])})
    write = state_files._write

    def full(contents: Any, draft: str, protocol: int) -> None:
        write(contents, draft, protocol=protocol)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_files, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        fleet_files.save(path, {"a": paddle.zeros([2])})
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.pdparams"]
    assert fleet_files.load(path)["a"].tolist() == [1.0, 1.0]

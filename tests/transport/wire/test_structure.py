"""Structures and headers survive their serialised form; what is damaged is refused at once."""

from __future__ import annotations

import contextlib
import json
import struct
import time
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import BoundaryError, TransportError
from fleetpipe.json_value import parse_small
from fleetpipe.transport import MessageKey, describe
from fleetpipe.transport.wire import structure as message
from fleetpipe.transport.wire.structure import (
    DEEPEST,
    HEADER_BYTES,
    LARGEST_ANNOUNCEMENT,
    LARGEST_PAYLOAD,
    MESSAGE,
    SIZES,
    Header,
    Route,
    Structure,
    decode,
    encode,
    pack_header,
    unpack_header,
)
from tests.fixtures import Patch

pytestmark = pytest.mark.no_paddle

ROUTE = Route(MessageKey("F", 0, 1, "", 3), 0, 1)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
LEAVES = st.one_of(
    st.just(("none",)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("int"), st.integers().map(hex)),
    st.tuples(st.just("float"), st.floats().map(repr)),
    st.tuples(st.just("str"), st.text()),
    st.tuples(st.just("tensor"), st.sampled_from(sorted(SIZES)), SHAPES, st.booleans()),
)
TREES = st.recursive(
    LEAVES,
    lambda trees: st.one_of(
        st.lists(trees, max_size=4).map(lambda parts: ("tuple", *parts)),
        st.lists(trees, max_size=4).map(lambda parts: ("list", *parts)),
        st.dictionaries(st.text(), trees, max_size=4).map(lambda d: ("dict", *d.items())),
    ),
    max_leaves=12,
)


@given(st.text(), TREES)
def test_round_trip(name: str, tree: Any) -> None:
    again, structure = decode(encode(name, Structure(tree), ROUTE))
    assert again == name
    assert structure.tree == tree
    assert structure.nbytes == Structure(tree).nbytes


@pytest.mark.parametrize(
    "tree",
    [
        [],
        ["what"],
        ["tensor", "float31", [1], True],
        ["tensor", "float32", [-1], True],
        ["tensor", "float32", [2**20, 2**20], True],
        ["tensor", "float32", [1.5], True],
        ["tensor", "float32", [1]],
        ["int", "ten"],
        ["float"],
        ["dict", ["key"]],
        ["none", 1],
        ["bool", "yes"],
        ["str", 7],
        ["float", "1" * 9_000_000],
        ["dict", [["key"], ["none"]]],
        ["tensor", "float32", 7, True],
        ["tensor", "float32", [1] * 10, True],
        ["tensor", "float32", [2**63, 0], True],
        ["tensor", {}, [1], True],
        7,
    ],
)
def test_what_no_sender_makes_is_refused(tree: Any) -> None:
    with pytest.raises(TransportError, match="announcement is damaged"):
        decode(json.dumps(["", tree]).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100000])
def test_what_is_no_announcement_is_refused(text: bytes) -> None:
    with pytest.raises(TransportError, match="announcement is damaged"):
        decode(text)


@pytest.mark.parametrize(
    "tree",
    [
        ["tensor", "uint8", [10**18] * 450_000 + [0], True],
        ["list", *[["none"]] * 1_000_000],
        ["dict", *[["k", ["none"]]] * 600_000],
        ["tensor", "uint8", [0.1] * 2_000_000, True],
    ],
    ids=["sizes", "parts", "entries", "fractions"],
)
def test_nine_megabytes_are_refused_at_once(tree: Any) -> None:
    """The first of these was not done after five minutes, for the product of its sizes."""
    text = json.dumps(["", tree], separators=(",", ":")).encode()
    begun = time.process_time()
    with pytest.raises(TransportError, match="announcement is damaged"):
        decode(text)
    assert time.process_time() - begun < 20


def test_more_tensors_than_this_host_has_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(message, "_MEMORY_BYTES", 1 << 34)
    tree = ["tensor", "uint8", [(1 << 34) + 1], True]
    with pytest.raises(TransportError, match="bytes of tensors, where this host has"):
        decode(json.dumps(["", tree]).encode())


def test_a_structure_nested_too_deep_is_refused() -> None:
    tree = ("none",)
    for _ in range(DEEPEST + 1):
        tree = ("list", tree)
    with pytest.raises(TransportError, match="too deep"):
        decode(json.dumps(["", tree]).encode())


def test_more_text_than_an_announcement_carries() -> None:
    with pytest.raises(BoundaryError, match="too large") as raised:
        encode("", Structure(("str", "x" * LARGEST_ANNOUNCEMENT)), ROUTE)
    assert "F of edge 0>1, micro-batch 3 from rank 0 to rank 1" in str(raised.value)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**17), 10**17), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_what_is_within_the_bounds_is_what_json_says(value: Any) -> None:
    assert parse_small(json.dumps(value).encode(), 50, 200, 500) == value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"[[[]]]", "too deep: more than 2"),
        (b"[[],[],[],[]]", "more than 4 lists"),
        (b'["a","b","c","d"]', "more than 3 strings"),
        (b"[12345678901234567890]", "more than 19 digits"),
        (b"[1.00000000000000000000]", "more than 19 digits"),
        ('["é"]'.encode(), "ascii"),
        ("[[[]]]".encode("utf-16"), "too deep"),
        (b"{", "Expecting"),
        (b'["[[[[[[', "Unterminated"),
        (b'["\\', "Unterminated"),
    ],
)
def test_what_is_beyond_them_is_refused(text: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_small(text, 2, 4, 3)


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_small(data, 2, 4, 3)


@pytest.mark.parametrize("piece", [b'\\"', b'"\\', b"\\\\", b"[1", b'"', b"-e", b"9"])
def test_a_text_of_megabytes_is_read_once(piece: bytes) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"more than|Expecting|Unterminated"):
        parse_small(b'["' + piece * 2_000_000, 130, 1 << 17, 1 << 18)
    assert time.process_time() - begun < 20


#: Those of the call and of the moment, which no checksum covers.
LAST_BYTES = 12
NUMBER = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    Header,
    frame=st.sampled_from([1, 2]),
    kind=st.sampled_from([ord(kind) for kind in "FBCH"]),
    source=NUMBER,
    target=NUMBER,
    channel=NUMBER,
    structure=NUMBER,
    micro_batch=NUMBER,
    announcement=st.integers(0, 1 << 24),
    payload=st.integers(0, LARGEST_PAYLOAD),
)
PLAIN = Header(MESSAGE, ord("F"), 0, 1, 0, 1, 3, 0, 4)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (MessageKey("F", 0, 1, "", 3), "F of edge 0>1, micro-batch 3"),
        (MessageKey("B", 0, 2, "mask", 0), "B of edge 0>2:mask, micro-batch 0"),
        (MessageKey("C", 0, 0, "loss", 7), "control message 'loss' number 7"),
        (MessageKey("H", 0, 0, "part", 0), "control message 'part' number 0"),
        (MessageKey("L", 0, 0, "stop", 2), "control message 'stop' number 2"),
    ],
)
def test_key_in_words(key: MessageKey, words: str) -> None:
    assert describe(key) == words
    assert str(Route(key, 4, 5)) == f"{words} from rank 4 to rank 5"


@given(HEADERS, NUMBER)
def test_header_round_trip(header: Header, call: int) -> None:
    before = time.monotonic_ns()
    data = pack_header(header, call)
    assert len(data) == HEADER_BYTES
    read, of_sender, moment = unpack_header(data)
    assert (read, of_sender) == (header, call)
    assert before <= moment <= time.monotonic_ns()


@pytest.mark.parametrize("position", range(HEADER_BYTES - LAST_BYTES))
def test_a_damaged_byte_is_noticed(position: int) -> None:
    data = bytearray(pack_header(PLAIN))
    data[position] ^= 0x10
    with pytest.raises(TransportError, match="damaged header"):
        unpack_header(bytes(data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payload": LARGEST_PAYLOAD + 1}, "absurd length"),
        ({"announcement": 2**32 - 1}, "absurd length"),
        ({"frame": 9}, "another version"),
        ({"kind": ord("X")}, "another version"),
    ],
)
def test_absurd_content_of_a_header_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        unpack_header(pack_header(PLAIN._replace(**changes)))


def test_another_version_is_named() -> None:
    fields = bytearray(pack_header(PLAIN)[: -LAST_BYTES - 4])
    fields[4] = 77
    with pytest.raises(TransportError, match="version 77"):
        unpack_header(bytes(fields) + struct.pack("<IIQ", zlib.crc32(fields), 0, 0))

"""Encodes and checks all of a message but its tensors: key, header, seal, structure of its value.

A message has up to three parts: the header, an announcement of the structure, the tensors' bytes. A
seal authenticates one part: a keyed BLAKE2b of the part and its number, with a key for each
direction of a connection, so that a part is valid at its position in the stream only. A structure
is a tree of plain tuples, compared by ``==``:
("tensor", dtype, shape, stop_gradient), ("none",), ("bool", x), ("int", hex), ("float", repr),
("str", x), ("tuple", child...), ("list", child...) and ("dict", (key, child)...).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fleetpipe import systems
from fleetpipe.errors import BoundaryError, TransportError
from fleetpipe.json_value import parse_small

#: The first bytes of each header, and the version of this format.
MAGIC, VERSION = b"FLTP", 5
#: The kinds of messages; see :class:`MessageKey`.
KINDS = b"FBCHL"
#: The kinds of messages that belong to no edge between stages.
CONTROL = ("C", "H", "L")
#: The two kinds of frames: a message, and the last frame of a peer that leaves.
MESSAGE, GOODBYE = 1, 2
LARGEST_NUMBER = 2**32 - 1
LARGEST_ANNOUNCEMENT = 1 << 24
LARGEST_PAYLOAD = 1 << 36

_FIELDS = struct.Struct("<4sBBBxIIIIIIQ")
_CHECKSUM = struct.Struct("<I")
_WHOLE = struct.Struct(_FIELDS.format + "I")
#: The last fields of a header, without a checksum: the collective call, and the time of sending.
_LAST = struct.Struct("<IQ")
HEADER_BYTES = _WHOLE.size + _LAST.size
#: Headers that are looked up and not made anew: each step has those of the step before. To make or
#: check one takes 7 us between a backward and a forward, where neither code nor data are in the
#: caches; to look it up takes 1 us.
_KNOWN_HEADERS = 4096

SEAL_BYTES = 16

_COUNT = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview

#: The structure of a value as nested tuples, in the form that the module's docstring lists.
Tree = tuple[Any, ...]

#: The deepest nesting, and the most parts, of a value.
DEEPEST, MOST_PARTS = 64, 1 << 16
#: The most dimensions of a tensor, in any version of Paddle's.
MOST_DIMENSIONS = 9
_LARGEST_SIZE = 2**63 - 1
# A part is a list; a tensor has one of its sizes besides, and an entry of a dict is one.
_MOST_LISTS = 2 + 3 * MOST_PARTS
_MOST_STRINGS = 2 * _MOST_LISTS
_DEEPEST_LIST = 2 + 2 * (DEEPEST + 1)
_MEMORY_BYTES = systems.memory_bytes()
_LONGEST_FLOAT = 32
#: Bytes of one element of each dtype that Paddle has in one version or another.
SIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

#: For each kind of plain value, the function that makes it of its content in a tree.
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": lambda text: int(text, 16),
    "float": float,
    "str": str,
}


class MessageKey(NamedTuple):
    """Names a message between two ranks; several messages with one key are first-in first-out.

    Attributes:
        kind: "F" for the value of an edge, "B" for its gradient, "C" for control, "H" for control
            with tensors that stay in the host's memory, "L" for control that another rank may take
            in a later collective call.
        source: The stage that produces the value of the edge; 0 for control.
        target: The stage that consumes the value of the edge; 0 for control.
        name: The edge's name, or the purpose of a control message.
        micro_batch: The micro-batch, 0 to 2**32 - 1.
    """

    kind: str
    source: int
    target: int
    name: str
    micro_batch: int


def describe(key: MessageKey) -> str:
    """Returns the key in words.

    >>> describe(MessageKey("F", 0, 1, "", 3))
    'F of edge 0>1, micro-batch 3'
    """
    if key.kind in CONTROL:
        return f"control message {key.name!r} number {key.micro_batch}"
    name = f":{key.name}" if key.name else ""
    return f"{key.kind} of edge {key.source}>{key.target}{name}, micro-batch {key.micro_batch}"


class Route(NamedTuple):
    """A message between two ranks, for error messages.

    Attributes:
        key: The message's key.
        source: The rank that sends it.
        target: The rank that receives it.
    """

    key: MessageKey
    source: int
    target: int

    def __str__(self) -> str:
        """Describes the message in words."""
        return f"{describe(self.key)} from rank {self.source} to rank {self.target}"


def check_key(key: MessageKey) -> None:
    """Refuses a key that a frame cannot carry.

    Raises:
        TransportError: The kind is unknown or a number is out of range.
    """
    numbers = (key.source, key.target, key.micro_batch)
    if (
        key.kind not in ("F", "B", *CONTROL)
        or not isinstance(key.name, str)
        or not all(isinstance(n, int) and 0 <= n <= LARGEST_NUMBER for n in numbers)
    ):
        raise TransportError(
            "a message cannot have this key",
            expected="kind F, B, C or H, a name that is a str, and numbers from 0 to 2**32 - 1",
            got=repr(tuple(key)),
            fix="send it with a MessageKey of this form",
        )


def check_peer(rank: int, ranks: int, peer: int, key: MessageKey) -> None:
    """Refuses a message to or from a rank that is not another rank of the pipeline.

    Raises:
        TransportError: ``peer`` is this rank itself or not in 0..ranks-1.
    """
    if peer == rank or not 0 <= peer < ranks:
        raise TransportError(
            f"rank {rank} has no connection to rank {peer}",
            where=describe(key),
            expected=f"another rank of 0 to {ranks - 1}",
            got=str(peer),
            fix="name another rank of this connection",
        )


class Header(NamedTuple):
    """The fixed first bytes of a frame.

    Attributes:
        frame: ``MESSAGE`` or ``GOODBYE``.
        kind: The key's kind, as the number of its letter.
        source: The key's source stage.
        target: The key's target stage.
        channel: The sender's number for (kind, source, target, name) on this connection.
        structure: How many times this channel has announced a structure.
        micro_batch: The key's micro-batch.
        announcement: Bytes of announcement that follow the header, most often 0.
        payload: Bytes of tensor data that follow the announcement.
    """

    frame: int
    kind: int
    source: int
    target: int
    channel: int
    structure: int
    micro_batch: int
    announcement: int
    payload: int


def pack_header(header: Header | tuple[int, ...], call: int = 0) -> bytes:
    """Returns the ``HEADER_BYTES`` bytes of a header, with a checksum and the current time.

    Args:
        header: The header.
        call: The kind of the collective call in which it is sent, as a number; 0 for none.
    """
    return _pack(header) + _LAST.pack(call, time.monotonic_ns())


def unpack_header(data: bytes) -> tuple[Header, int, int]:
    """Reads the ``HEADER_BYTES`` bytes of a header.

    Returns:
        The header; the kind of its sender's collective call, as a number; and when it was packed,
        in nanoseconds of its sender's clock.

    Raises:
        TransportError: The bytes are no header of this version, or are damaged.
    """
    return (_unpack(data[: _WHOLE.size]), *_LAST.unpack_from(data, _WHOLE.size))


@functools.lru_cache(_KNOWN_HEADERS)
def _pack(header: Header | tuple[int, ...]) -> bytes:
    """Returns the bytes of a header's fields and their checksum."""
    fields = _FIELDS.pack(MAGIC, VERSION, *header)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


@functools.lru_cache(_KNOWN_HEADERS)
def _unpack(data: bytes) -> Header:
    """Returns the header in the bytes that :func:`_pack` made, after a check of the checksum."""
    magic, version, *fields, checksum = _WHOLE.unpack(data)
    if magic != MAGIC or checksum != zlib.crc32(data[: _FIELDS.size]):
        raise TransportError(
            "a frame begins with a damaged header",
            expected=f"{_WHOLE.size} bytes that begin with {MAGIC!r} and end with their checksum",
            got=data.hex(),
        )
    header = Header._make(fields)
    if version != VERSION or header.frame not in (MESSAGE, GOODBYE) or header.kind not in KINDS:
        raise TransportError(
            "a frame has a header of another version",
            expected=f"version {VERSION}, frame {MESSAGE} or {GOODBYE}, kind F, B, C or H",
            got=f"version {version}, frame {header.frame}, kind {chr(header.kind)!r}",
            fix="install the same version of fleetpipe on every host",
        )
    if header.announcement > LARGEST_ANNOUNCEMENT or header.payload > LARGEST_PAYLOAD:
        raise TransportError(
            "a frame claims an absurd length",
            expected=f"at most {LARGEST_ANNOUNCEMENT} bytes of announcement and "
            f"{LARGEST_PAYLOAD} bytes of payload",
            got=f"{header.announcement} and {header.payload}",
        )
    return header


class Seal:
    """Makes, or checks, the seals of one direction of a connection, one part after another."""

    def __init__(self, key: bytes) -> None:
        """Starts at the first part; ``key`` is a secret of at most 64 bytes."""
        self._key = key
        self._count = 0

    def of(self, pieces: Iterable[Buffer]) -> bytes:
        """Returns the seal of the next part, which consists of ``pieces`` in order."""
        hasher = hashlib.blake2b(_COUNT.pack(self._count), key=self._key, digest_size=SEAL_BYTES)
        self._count += 1
        for piece in pieces:
            hasher.update(piece)
        return hasher.digest()

    def check(self, pieces: Iterable[Buffer], seal: Buffer) -> None:
        """Checks that ``seal`` is the seal of the next part, which consists of ``pieces``.

        Raises:
            TransportError: The part is not, bit for bit, the next one that the other end sent.
        """
        if not hmac.compare_digest(self.of(pieces), bytes(seal)):
            raise TransportError(
                "a part of the stream does not have the seal of the rank at its other end",
                cause="it was changed, repeated, left out or made up on the way",
            )


class Seals(NamedTuple):
    """The seals of a connection, from the view of one end.

    Attributes:
        outgoing: Makes the seals of what this end sends.
        incoming: Checks the seals of what it receives.
    """

    outgoing: Seal
    incoming: Seal


class TensorLeaf:
    """Describes a tensor of a message before its data is there.

    Attributes:
        dtype: Name of the dtype, as Paddle spells it.
        shape: The shape; () for one number.
        stop_gradient: Whether the sender's tensor takes no gradient.
        nbytes: Bytes of its data.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], stop_gradient: bool) -> None:
        """Computes the bytes of a tensor of this dtype and shape."""
        self.dtype = dtype
        self.shape = shape
        self.stop_gradient = stop_gradient
        self.nbytes = SIZES[dtype] * math.prod(shape)


class Structure:
    """The structure of a value, with the sizes and dtypes of its tensors.

    Attributes:
        tree: The structure as nested tuples.
        leaves: The value's tensors, in order.
        nbytes: Bytes of the data of all tensors.
    """

    def __init__(self, tree: Tree) -> None:
        """Reads the tensors' dtypes and shapes from ``tree``."""
        self.tree = tree
        self.leaves = tuple(TensorLeaf(*leaf[1:]) for leaf in _tensor_leaves(tree))
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        #: Whether the value is a tuple of one tensor, as the gradients of an edge mostly are.
        self._is_one_tuple = tree[0] == "tuple" and len(tree) == 2 and tree[1][0] == "tensor"

    def rebuild(self, tensors: list[Any]) -> Any:
        """Returns the value of this structure that has ``tensors``, in order."""
        if self.tree[0] == "tensor":
            return tensors[0]
        if self._is_one_tuple:
            return (tensors[0],)
        return _rebuild(self.tree, iter(tensors))


def encode(name: str, structure: Structure, route: Route) -> bytes:
    """Returns the announcement of a channel's structure: JSON in ASCII.

    Args:
        name: The name of the channel's edge.
        structure: The structure its values have from now on.
        route: The message, for the text of an error.

    Raises:
        BoundaryError: The structure or its tensors are larger than a message may be.
    """
    text = json.dumps([name, structure.tree], separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_ANNOUNCEMENT or structure.nbytes > LARGEST_PAYLOAD:
        raise BoundaryError(
            "a value is too large to cross to another stage",
            where=str(route),
            expected=f"at most {LARGEST_PAYLOAD} bytes of tensors and {LARGEST_ANNOUNCEMENT} "
            "bytes of everything else",
            got=f"{structure.nbytes} and {len(text)} bytes",
            fix="put long texts and long lists of numbers into tensors; cut large tensors",
        )
    return text


def decode(text: bytes) -> tuple[str, Structure]:
    """Reads an announcement of :func:`encode`; returns the name of the edge and the structure.

    Raises:
        TransportError: The bytes are not an announcement, or the structure is too large.
    """
    try:
        name, tree = parse_small(text, _DEEPEST_LIST, _MOST_LISTS, _MOST_STRINGS)
        if type(name) is not str:
            raise ValueError("the name is no text")
        structure = Structure(_tree_of_json(tree, DEEPEST))
        if structure.nbytes > min(LARGEST_PAYLOAD, _MEMORY_BYTES):
            raise ValueError(
                f"{structure.nbytes} bytes of tensors, where this host has {_MEMORY_BYTES}"
            )
    except (ValueError, TypeError, LookupError) as error:
        raise TransportError(
            "an announcement is damaged",
            expected="the name of a channel and the structure of its values, in JSON",
            got=f"{text[:200]!r} ({str(error)[:200]})",
            fix="install the same version of fleetpipe on every host",
        ) from None
    return name, structure


def _tensor_leaves(tree: Tree) -> Iterator[Tree]:
    """Yields the parts of a tree that stand for tensors, in order."""
    kind = tree[0]
    if kind == "tensor":
        yield tree
    elif kind == "dict":
        for _, child in tree[1:]:
            yield from _tensor_leaves(child)
    elif kind in ("tuple", "list"):
        for child in tree[1:]:
            yield from _tensor_leaves(child)


def _rebuild(tree: Tree, tensors: Iterator[Any]) -> Any:
    """Returns the value of a tree, and takes the next of ``tensors`` for each of its tensors."""
    kind = tree[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: _rebuild(child, tensors) for key, child in tree[1:]}
    if kind == "list":
        return [_rebuild(child, tensors) for child in tree[1:]]
    if kind == "tuple":
        return tuple(_rebuild(child, tensors) for child in tree[1:])
    return None if kind == "none" else _SCALARS[kind](tree[1])


def _tree_of_json(node: Any, depth: int) -> Tree:
    """Turns the lists of JSON into tuples; refuses a tree that no sender creates.

    Args:
        node: A list that begins with the kind.
        depth: How many more levels may be nested in it.

    Raises:
        ValueError: A sender does not create such a tree.
    """
    kind, rest = node[0], node[1:]
    if kind == "tensor":
        dtype, shape, stop_gradient = rest
        fits = len(shape) <= MOST_DIMENSIONS
        if not fits or not all(type(n) is int and 0 <= n <= _LARGEST_SIZE for n in shape):
            raise ValueError(f"a shape that no tensor has, {str(shape[:MOST_DIMENSIONS])[:200]}")
        if dtype not in SIZES:
            raise ValueError(f"dtype {str(dtype)[:40]!r}")
        return (kind, dtype, tuple(shape), bool(stop_gradient))
    if kind == "none" and not rest:
        return ("none",)
    if kind in _SCALARS:
        (content,) = rest
        if type(content) is not (bool if kind == "bool" else str):
            raise ValueError(f"{kind} of another type")
        if kind == "float" and len(str(content)) > _LONGEST_FLOAT:
            raise ValueError("a float of too many characters")
        _SCALARS[kind](content)
        return (kind, content)
    if not depth or kind not in ("tuple", "list", "dict"):
        raise ValueError(f"unknown or too deep: {str(kind)[:40]!r}")
    if kind == "dict":
        return (kind, *(_dict_entry_of_json(key, child, depth) for key, child in rest))
    return (kind, *(_tree_of_json(child, depth - 1) for child in rest))


def _dict_entry_of_json(key: Any, child: Any, depth: int) -> tuple[str, Tree]:
    """Returns a dict's key, and its value's tree."""
    if type(key) is not str:
        raise ValueError("a key that is no text")
    return key, _tree_of_json(child, depth - 1)


#: The structure of None, and of a channel or frame whose structure is not known yet.
NOTHING = Structure(("none",))

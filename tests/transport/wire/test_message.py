"""Keys in words, and headers that are refused when they are damaged."""

from __future__ import annotations

import struct
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import TransportError
from fleetpipe.transport import MessageKey, describe
from fleetpipe.transport.wire.message import (
    HEADER_BYTES,
    LARGEST_PAYLOAD,
    MESSAGE,
    Header,
    Route,
    check_key,
    check_peer,
    pack_header,
    unpack_header,
)

pytestmark = pytest.mark.no_paddle

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
def test_a_sound_header_with_absurd_content_is_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(TransportError, match=message):
        unpack_header(pack_header(PLAIN._replace(**changes)))


def test_another_version_is_named() -> None:
    fields = bytearray(pack_header(PLAIN)[: -LAST_BYTES - 4])
    fields[4] = 77
    with pytest.raises(TransportError, match="version 77"):
        unpack_header(bytes(fields) + struct.pack("<IIQ", zlib.crc32(fields), 0, 0))


@pytest.mark.parametrize(
    "key",
    [
        MessageKey("W", 0, 1, "", 0),
        MessageKey("F", -1, 1, "", 0),
        MessageKey("F", 0, 2**32, "", 0),
        MessageKey("F", 0, 1, b"mask", 0),
        MessageKey("F", 0, 1, "", 0.5),
    ],
)
def test_keys_that_no_frame_carries(key: MessageKey) -> None:
    with pytest.raises(TransportError, match="kind F, B, C or H"):
        check_key(key)


@pytest.mark.parametrize("peer", [1, -1, 3])
def test_peers_that_are_none(peer: int) -> None:
    with pytest.raises(TransportError, match=f"no connection to rank {peer}"):
        check_peer(1, 3, peer, MessageKey("F", 0, 1, "", 0))

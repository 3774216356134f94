"""JSON is measured before it is parsed."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.transport.wire.parsing import parse

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**17), 10**17), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_what_is_within_the_bounds_is_what_json_says(value: Any) -> None:
    assert parse(json.dumps(value).encode(), 50, 200, 500) == value


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
        parse(text, 2, 4, 3)


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse(data, 2, 4, 3)


@pytest.mark.parametrize("piece", [b'\\"', b'"\\', b"\\\\", b"[1", b'"', b"-e", b"9"])
def test_a_text_of_megabytes_is_read_once(piece: bytes) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"more than|Expecting|Unterminated"):
        parse(b'["' + piece * 2_000_000, 130, 1 << 17, 1 << 18)
    assert time.process_time() - begun < 3

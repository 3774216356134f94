"""Parses JSON from other processes, after checking that it is small.

A parser recurses as deep as the text does, and takes a time that grows with the square of a
number's digits.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST_DIGITS = 19

# One that does not end goes to the end of the text, so that no character is looked at twice.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_NUMBER = re.compile(rb"[0-9.eE+-]+")


def parse(text: bytes, deepest: int, most: int, strings: int) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: JSON in ASCII, of a length that its reader has bounded.
        deepest: Lists and objects that may lie within each other.
        most: Lists and objects in all.
        strings: Strings in all, those with backslashes at their ends counted half.

    Raises:
        ValueError: The text is no JSON, or larger than that.
    """
    if text.count(b'"') - text.count(b'\\"') > 2 * strings:
        raise ValueError(f"more than {strings} strings")
    bare = _STRING.sub(b'""', text)
    if bare.count(b"[") + bare.count(b"{") > most:
        raise ValueError(f"too deep or too many: more than {most} lists and objects")
    depth = 0
    for bracket in _BRACKET.findall(bare):
        depth += 1 if bracket in b"[{" else -1
        if depth > deepest:
            raise ValueError(f"too deep: more than {deepest} lists and objects within each other")
    if max(map(len, _NUMBER.findall(bare)), default=0) > MOST_DIGITS:
        raise ValueError(f"a number of more than {MOST_DIGITS} digits")
    return json.loads(text.decode("ascii"))

"""Reads JSON from any source: each value knows its location, and is checked when it is read.

    value = parse(text, Source("this is no profile", ConfigError, "measure one"))
    names = [layer["name"].text() for layer in value["layers"].items()]

An unexpected value raises the error of the source, which names the location, the expected and the
actual value, and the file if :func:`read` read one. :func:`parse_small` parses texts that other
processes send, after checking that they are small.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fleetpipe.errors import FleetPipeError, nearest

Record = TypeVar("Record")

#: The largest time or size that is read: sums and products of several stay finite.
MOST = 1e100

#: The first whole number that is too large.
_MOST_COUNT = 1 << 63

#: The largest number of digits of a number in a text that another process sends.
_MOST_DIGITS = 19
# A string without an end goes to the end of the text, so that no character is read twice.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_NUMBER = re.compile(rb"[0-9.eE+-]+")


class Source(NamedTuple):
    """Describes where JSON comes from, for the errors of its values.

    Attributes:
        summary: The first line of an error, a sentence.
        error: The class of the error.
        fix: The next step for the reader.
    """

    summary: str
    error: type[FleetPipeError]
    fix: str

    def refused(self, place: str = "", *, expected: str, got: str) -> FleetPipeError:
        """Returns the error of a wrong value.

        Args:
            place: The value's location in the document; "" for the whole.
            expected: What the value should be.
            got: What the value is.
        """
        return self.error(self.summary, where=place, expected=expected, got=got, fix=self.fix)


class JsonValue:
    """A value of JSON.

    Attributes:
        content: The value, as :mod:`json` returns it.
        place: Its location in the document, such as ``stages[0].forward``; "" for the whole.
        source: The source that it was read from.
    """

    __slots__ = ("content", "place", "source")

    def __init__(self, content: object, source: Source, place: str = "") -> None:
        self.content, self.source, self.place = content, source, place

    def refused(self, expected: str) -> FleetPipeError:
        """Returns the error of this wrong value; ``expected`` says what it should be."""
        return self.source.refused(self.place, expected=expected, got=reprlib.repr(self.content))

    def fields(self) -> dict[str, JsonValue]:
        """Returns the values of an object by name."""
        if not isinstance(self.content, dict):
            raise self.refused("an object")
        return {name: self._value_at(value, f".{name}") for name, value in self.content.items()}

    def items(self) -> list[JsonValue]:
        """Returns the values of a list."""
        if not isinstance(self.content, list):
            raise self.refused("a list")
        return [self._value_at(value, f"[{index}]") for index, value in enumerate(self.content)]

    def get(self, name: str) -> JsonValue | None:
        """Returns the value of a field of an object; None if it is missing or null."""
        value = self.fields().get(name)
        return None if value is None or value.content is None else value

    def __getitem__(self, name: str) -> JsonValue:
        """Returns the value of a field of an object, which must exist."""
        value = self.fields().get(name)
        if value is None:
            raise self.refused(f"an object with {name!r}")
        return value

    def text(self) -> str:
        """Returns a string that UTF-8 can encode."""
        if isinstance(self.content, str):
            with suppress(UnicodeEncodeError):
                self.content.encode()
                return self.content
        raise self.refused("a text")

    def number(self) -> float:
        """Returns a number, whole or not, of any sign; infinities and NaN are allowed."""
        if isinstance(self.content, float):
            return self.content
        if type(self.content) is not int or abs(self.content) >= _MOST_COUNT:
            raise self.refused("a number")
        return self.content

    def figure(self) -> float:
        """Returns a time or a size: a number from 0 to 1e100."""
        content = self.content
        if type(content) not in (int, float) or not 0 <= content <= MOST:  # type: ignore[operator]
            raise self.refused("a number of 0 or more")
        return content  # type: ignore[return-value]

    def count(self) -> int:
        """Returns a whole number of 0 or more."""
        if type(self.content) is not int or not 0 <= self.content < _MOST_COUNT:
            raise self.refused("a whole number of 0 or more")
        return self.content

    def flag(self) -> bool:
        """Returns true or false."""
        if not isinstance(self.content, bool):
            raise self.refused("true or false")
        return self.content

    def texts(self) -> tuple[str, ...]:
        """Returns a list of strings."""
        return tuple(item.text() for item in self.items())

    def figures(self) -> tuple[float, ...]:
        """Returns a list of times or sizes, as :meth:`figure` reads each."""
        return tuple(item.figure() for item in self.items())

    def differences(self) -> tuple[float, ...]:
        """Returns a list of numbers of any sign from -1e100 to 1e100, as between two clocks.

        With this limit, as with that of :meth:`figure`, sums of them stay finite.
        """
        differences = tuple(item.number() for item in self.items())
        if not all(abs(number) <= MOST for number in differences):
            raise self.refused("numbers from -1e100 to 1e100")
        return differences

    def counts(self) -> tuple[int, ...]:
        """Returns a list of whole numbers."""
        return tuple(item.count() for item in self.items())

    def require_names(self, names: Collection[str]) -> None:
        """Refuses an object with a field that is not in ``names``; the error names the nearest."""
        for name in self.fields():
            if name not in names:
                raise self.source.refused(
                    self.place,
                    expected=f"{', '.join(names)}: {nearest(name, names)}",
                    got=reprlib.repr(name),
                )

    def record(
        self,
        kind: type[Record],
        each: Callable[[JsonValue], Any] | None = None,
        **readers: Callable[[JsonValue], Any],
    ) -> Record:
        """Returns a dataclass or named tuple with the fields of an object.

        Fields with a default may be left out; null stands for a default of None.

        Args:
            kind: The class.
            each: Converts the value of a field; by default the field's annotation decides: a
                number, a text or a tuple of these.
            readers: By the name of a field, a function that is used in place of ``each``.
        """
        cls: Any = kind
        defaults = _defaults_by_field(cls)
        self.require_names(defaults)
        given_fields, values = self.fields(), {}
        for name, default in defaults.items():
            value = given_fields.get(name)
            if value is not None and (value.content is not None or default is not None):
                read_field = readers.get(name) or each or _reader_of_field(cls, name)
                values[name] = read_field(value)
            elif default is MISSING:
                raise self.refused(f"an object with {name!r}")
        return kind(**values)

    def row(self, kind: type[Record], **readers: Callable[[JsonValue], Any]) -> Record:
        """Returns a named tuple with the values of a list, in their order.

        Args:
            kind: The class.
            readers: By the name of a field, a function that converts its value; by default the
                field's annotation decides.
        """
        cls: Any = kind
        items, names = self.items(), _defaults_by_field(cls)
        if len(items) != len(names):
            raise self.refused(f"a list of {len(names)} values")
        field_readers = [readers.get(name) or _reader_of_field(cls, name) for name in names]
        return kind(*(read_field(item) for read_field, item in zip(field_readers, items)))

    def _value_at(self, content: object, step: str) -> JsonValue:
        """Returns a value inside this one, at ``.name`` of an object or ``[index]`` of a list."""
        return JsonValue(content, self.source, f"{self.place}{step}".lstrip("."))


def parse(text: str | bytes, source: Source) -> JsonValue:
    """Returns the value of a JSON text.

    Raises:
        FleetPipeError: The text is no JSON, or nested too deeply; the class is the source's.
    """
    try:
        return JsonValue(json.loads(text), source)
    except (ValueError, RecursionError) as error:
        raise source.refused(expected="JSON", got=str(error)) from error


def parse_small(text: bytes, deepest: int, most: int, strings: int) -> Any:
    """Returns the value of a JSON text that another process has sent.

    Nesting and digits are checked first: a parser recurses as deep as the text, and its time grows
    with the square of a number's digits.

    Args:
        text: JSON in ASCII, of a length that its reader has bounded.
        deepest: The largest number of lists and objects within each other.
        most: The largest number of lists and objects in all.
        strings: The largest number of strings; a string that ends in a backslash counts half.

    Raises:
        ValueError: The text is no JSON, or exceeds one of these numbers.
    """
    # A string has two quotes that no backslash precedes.
    if text.count(b'"') - text.count(b'\\"') > 2 * strings:
        raise ValueError(f"more than {strings} strings")
    # With empty strings, so that their brackets and digits do not count.
    bare = _STRING.sub(b'""', text)
    if bare.count(b"[") + bare.count(b"{") > most:
        raise ValueError(f"too deep or too many: more than {most} lists and objects")
    depth = 0
    for bracket in _BRACKET.findall(bare):
        depth += 1 if bracket in b"[{" else -1
        if depth > deepest:
            raise ValueError(f"too deep: more than {deepest} lists and objects within each other")
    if max(map(len, _NUMBER.findall(bare)), default=0) > _MOST_DIGITS:
        raise ValueError(f"a number of more than {_MOST_DIGITS} digits")
    return json.loads(text.decode("ascii"))


def read(
    path: str | os.PathLike[str], source: Source, build: Callable[[JsonValue], Record]
) -> Record:
    """Reads a file of JSON, or of TOML if its name ends in ``.toml``; returns ``build(value)``.

    Args:
        path: The file.
        source: Describes the file for errors.
        build: Converts the value of the file; errors that it raises get the path of the file.

    Raises:
        FleetPipeError: The file cannot be read or is no JSON; or an error of ``build``.
    """
    toml = str(path).endswith(".toml")
    return read_text(
        path, source, lambda text: build(parse_toml(text, source) if toml else parse(text, source))
    )


def parse_toml(text: str, source: Source) -> JsonValue:
    """Returns the value of a TOML text; Python has a parser from 3.11 on.

    Raises:
        FleetPipeError: The text is no TOML, or Python is older; the class is the source's.
    """
    try:
        toml = importlib.import_module("tomllib")
    except ImportError:
        raise source.refused(
            expected="JSON: reading TOML needs Python 3.11", got="a file of TOML"
        ) from None
    try:
        return JsonValue(toml.loads(text), source)
    except (ValueError, RecursionError) as error:
        raise source.refused(expected="TOML", got=str(error)) from error


def read_text(
    path: str | os.PathLike[str], source: Source, build: Callable[[str], Record]
) -> Record:
    """Reads a file and returns ``build(text)``; errors name the file, as in :func:`read`."""
    if not isinstance(path, (str, os.PathLike)):
        raise source.refused(expected="the path of a file", got=type(path).__name__)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise source.refused(str(path), expected="a readable file", got=str(error)) from error
    try:
        return build(text)
    except FleetPipeError as error:
        error.add_place(str(path))
        raise


#: The method of :class:`JsonValue` that converts a field's value, by the field's annotation.
_READERS: dict[str, Callable[[JsonValue], Any]] = {
    "bool": JsonValue.flag,
    "int": JsonValue.count,
    "float": JsonValue.figure,
    "str": JsonValue.text,
    "tuple[int, ...]": JsonValue.counts,
    "tuple[float, ...]": JsonValue.figures,
    "tuple[str, ...]": JsonValue.texts,
}


@cache
def _reader_of_field(kind: type[Any], name: str) -> Callable[[JsonValue], Any]:
    """Returns the method of :data:`_READERS` for a field of a class."""
    annotation = kind.__annotations__[name]
    text = str(getattr(annotation, "__forward_arg__", annotation))
    return _READERS[text.removesuffix(" | None")]


@cache
def _defaults_by_field(kind: type[Any]) -> dict[str, object]:
    """Returns the fields of a class with their defaults; MISSING for those without one."""
    if is_dataclass(kind):
        return {field.name: field.default for field in fields(kind)}
    return {name: kind._field_defaults.get(name, MISSING) for name in kind._fields}

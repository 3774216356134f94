"""The text form of schedules and plans: a header line, then one line of tokens for each rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules.action import Item, Op, parse_item, parse_op
from fleetpipe.schedules.explain import entries_around
from fleetpipe.schedules.placement import Edge, Placement, checked_edges, parse_edge
from fleetpipe.schedules.rows import Options, PlanRows, ScheduleRows

_SCHEDULE = "fleetpipe-schedule"
_PLAN = "fleetpipe-plan"

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_KEYS = ("name", "ranks", "micro_batches", "chunks", "placement")

#: The place that an error of the header names.
_HEADER = "line 1, the header"

#: The line of a rank that does nothing.
IDLE = "-"

Entry = TypeVar("Entry")


def write_schedule(schedule: ScheduleRows) -> str:
    """Returns the text form of a schedule, without a final line break."""
    return _write_document(_SCHEDULE, schedule, schedule.actions)


def read_schedule(text: str) -> ScheduleRows:
    """Reads the text form of a schedule, which :func:`write_schedule` writes.

    Raises:
        ScheduleError: Names the line, the token and what was expected there.
    """
    document: tuple[dict[str, Any], tuple[tuple[Item, ...], ...]] = _read_document(
        _SCHEDULE, text, parse_item, "an action like F0.3 or (F0.3|B1.2)"
    )
    fields, rows = document
    return ScheduleRows(actions=rows, **fields)


def write_plan(plan: PlanRows) -> str:
    """Returns the text form of a plan, without a final line break."""
    edges = ",".join(map(str, plan.edges)) or IDLE
    return _write_document(_PLAN, plan, plan.ops, f"edges={edges}")


def read_plan(text: str) -> PlanRows:
    """Reads the text form of a plan; raises the errors of :func:`read_schedule`."""
    document: tuple[dict[str, Any], tuple[tuple[Op, ...], ...]] = _read_document(
        _PLAN, text, parse_op, "F0.3, SF0>1.3, RF0>1.3, SB.., RB.., FREE0.3, REDUCE or STEP"
    )
    fields, rows = document
    edges = _read_edges(fields.pop("edges"), fields["placement"])
    return PlanRows(edges=edges, ops=rows, **fields)


def _write_document(
    form: str, value: ScheduleRows | PlanRows, rows: Sequence[Sequence[object]], *last: str
) -> str:
    """Returns the text form of a schedule or plan: a header, and a line for each rank.

    ``form`` is ``_SCHEDULE`` or ``_PLAN``; ``last`` are further fields at the end of the header.
    """
    placement = value.placement
    # As a JSON object without spaces.
    options = json.dumps(dict(value.options), separators=(",", ":")).replace(" ", "\\u0020")
    fields = [
        f"# {form} 1 name={value.name}",
        f"ranks={placement.ranks}",
        f"micro_batches={value.micro_batches}",
        f"chunks={placement.chunks}",
        f"placement={placement.name}",
        *(["forward_only=true"] if value.forward_only else []),
        *([f"slices={value.slices}"] if value.slices > 1 else []),
        *([f"options={options}"] if value.options else []),
        *last,
    ]
    return "\n".join([" ".join(fields), *(" ".join(map(str, row)) or IDLE for row in rows)])


def _read_document(
    form: str, text: str, entry: Callable[[str, int], Entry | None], expected: str
) -> tuple[dict[str, Any], tuple[tuple[Entry, ...], ...]]:
    """Reads the text form of a schedule or plan.

    Args:
        form: ``_SCHEDULE`` or ``_PLAN``.
        text: The document. Blank lines at its end are ignored.
        entry: Reads one token, given the number of slices; returns None if it is not valid.
        expected: What a token looks like, for the error.

    Returns:
        The fields that :func:`_read_header` returns, and the row of each rank.
    """
    lines = text.rstrip().split("\n")
    header = _read_header(form, lines[0].strip())
    ranks, slices = header["placement"].ranks, header["slices"]
    if len(lines) - 1 != ranks:
        raise ScheduleError(
            f"the number of lines does not fit ranks={ranks} of the header",
            where=f"line {min(len(lines), ranks + 1)}",
            expected=f"{ranks} lines after the header, one for each rank ({IDLE!r} where idle)",
            got=f"{len(lines) - 1} lines",
            fix="write one line for each rank, or change ranks= in the header",
        )
    if slices > 1:
        expected += f", with one of {slices} slices after the micro-batch, as in F0.3/1"
    rows = [
        _read_row(number, line, lambda token: entry(token, slices), expected)
        for number, line in enumerate(lines[1:], 2)
    ]
    return header, tuple(rows)


def _read_row(
    number: int, line: str, entry: Callable[[str], Entry | None], expected: str
) -> tuple[Entry, ...]:
    """Reads line ``number`` of the document, which has the row of one rank.

    ``entry`` reads one token, and returns None if it is not valid; ``expected`` says in the error
    what a token looks like.
    """
    tokens = line.split()
    if tokens == [IDLE]:
        return ()
    row: list[Entry] = []
    for index, token in enumerate(tokens):
        value = entry(token)
        if value is None:
            raise ScheduleError(
                f"cannot read {token!r}",
                where=f"line {number} (rank {number - 2}), token #{index}",
                expected=expected,
                got=entries_around(tokens, index),
                fix="write it in one of these ways, with a blank between two tokens",
            )
        row.append(value)
    if not row:
        raise ScheduleError(
            "a line is empty",
            where=f"line {number}",
            expected=f"tokens, or {IDLE!r} where idle",
            fix=f"write {IDLE!r} where the rank is idle",
        )
    return tuple(row)


def _read_header(form: str, line: str) -> dict[str, Any]:
    """Reads the first line, ``# fleetpipe-schedule 1 name=.. ranks=.. ..``.

    Returns:
        The fields of ``ScheduleRows`` without actions, or those of ``PlanRows`` without operations
        and with the edges as text.
    """
    words = line.split()
    if words[:3] != ["#", form, "1"]:
        raise ScheduleError(
            "the first line is no header", where=_HEADER, expected=f"'# {form} 1 name=..'", got=line
        )
    fields: dict[str, str] = {}
    wanted = (*_KEYS, "edges") if form == _PLAN else _KEYS
    for word in words[3:]:
        key, equals, value = word.partition("=")
        if not (equals and value) or key not in (*wanted, "forward_only", "slices", "options"):
            raise _header_error(
                f"cannot read {word!r}", "one of " + " ".join(f"{key}=" for key in wanted), line
            )
        if key in fields:
            raise _header_error(f"the key {key!r} stands twice", f"one {key}=", word)
        fields[key] = value
    for key in wanted:
        if key not in fields:
            raise _header_error(f"the key {key!r} is missing", f"{key}=..", line)
    numbers = {key: _read_number(key, fields[key]) for key in ("ranks", "micro_batches", "chunks")}
    if fields.get("forward_only", "true") != "true":
        raise _header_error("cannot read forward_only", "forward_only=true, or no such key", line)
    try:
        placement = Placement(fields["placement"], numbers["ranks"], numbers["chunks"])
    except ConfigError as error:
        raise ScheduleError(str(error), where="line 1") from error
    return {
        "name": fields["name"],
        "placement": placement,
        "micro_batches": numbers["micro_batches"],
        "forward_only": "forward_only" in fields,
        "slices": _read_number("slices", fields.get("slices", "1")),
        "options": _read_options(fields.get("options", "{}")),
        **({"edges": "" if fields["edges"] == IDLE else fields["edges"]} if form == _PLAN else {}),
    }


def _read_options(text: str) -> Options:
    """Reads the options of the header, a JSON object."""
    try:
        options = json.loads(text)
        pairs = tuple((name, _lists_as_tuples(value)) for name, value in options.items())
    except (ValueError, AttributeError, RecursionError) as error:
        expected = 'an object of JSON without spaces, as {"groups":[2]}, sorted by name'
        raise _header_error("cannot read options", expected, text) from error
    return tuple(sorted(pairs))


def _lists_as_tuples(value: object) -> object:
    """Returns an option's value from JSON with tuples for lists; refuses an object in it."""
    if isinstance(value, dict):
        raise ValueError("an object in an option")
    return tuple(map(_lists_as_tuples, value)) if isinstance(value, list) else value


def _read_edges(text: str, placement: Placement) -> tuple[Edge, ...]:
    """Reads the edges in a plan's header, such as ``0>1,0>2:mask``, which have to be sorted."""
    edges = []
    for word in text.split(",") if text else ():
        edge = parse_edge(word)
        if edge is None:
            raise ScheduleError(
                f"cannot read the edge {word!r}",
                where=_HEADER,
                expected="edges like 0>1 or 0>2:mask, separated by commas",
                fix="write each edge in this way",
            )
        edges.append(edge)
    try:
        ordered = checked_edges(edges, placement)
    except ConfigError as error:
        raise ScheduleError(str(error), where=_HEADER) from error
    if list(ordered) != edges:
        raise ScheduleError(
            "the edges are not sorted",
            where=_HEADER,
            expected=",".join(map(str, ordered)),
            got=text,
            fix="write the edges in this order",
        )
    return ordered


def _read_number(key: str, value: str) -> int:
    """Reads a whole number of at least 1 of the header."""
    if not _NUMBER.fullmatch(value) or value == "0":
        raise _header_error(f"cannot read {key}={value}", "a whole number of at least 1", value)
    return int(value)


def _header_error(summary: str, expected: str, got: str) -> ScheduleError:
    """Returns the error of a header that cannot be read."""
    return ScheduleError(
        summary,
        where=_HEADER,
        expected=expected,
        got=got,
        fix="correct the header: it has each key once, as key=value",
    )

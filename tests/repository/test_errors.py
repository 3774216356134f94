"""Every error of the family tells the reader what to do next, room by room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fleetpipe import errors
from fleetpipe.errors import (
    BoundaryError,
    CheckpointError,
    ConfigError,
    PeerFailed,
    UsageError,
    is_permanent,
)
from tests.check_types import ROOT, sources, tree

pytestmark = pytest.mark.once

#: Folders and files, without ``.py``, whose errors all have a ``fix`` or a reason below.
ROOMS = (
    "fleetpipe/arguments fleetpipe/cli fleetpipe/config fleetpipe/io fleetpipe/numerics"
    " fleetpipe/paddle_api",
    "fleetpipe/checkpoint",
    "fleetpipe/contrib/compat",
    "fleetpipe/engine",
    "fleetpipe/fleet/meta_parallel fleetpipe/fleet/overlay fleetpipe/fleet/strategy"
    " fleetpipe/fleet/high_level fleetpipe/fleet/lifecycle fleetpipe/fleet/wrapping",
    "fleetpipe/job",
    "fleetpipe/launch",
    "fleetpipe/parity",
    "fleetpipe/partition",
    "fleetpipe/schedules",
    "fleetpipe/transport",
    "dygraph/backward",
    "dygraph/layers",
    "dygraph/observe",
    "dygraph/optimizer",
    "dygraph/tensor_parallel",
    "dygraph/train",
    "dygraph/model",
    "dygraph/batch",
    "dygraph/state",
    "dygraph/nest",
    "dygraph/random_keys",
    "dygraph/layer_kinds",
    "static",
)

#: Where an error has no ``fix``, by file and function, and why.
REASONS = {
    "fleetpipe/engine/engine.py _wait": "an order that was made wrong: nothing users can change",
    "fleetpipe/job/watch.py _error_to_raise": "it repeats an error that says what to do",
    "fleetpipe/job/watch.py _check_limit": "a Failure carries it to its error",
    "fleetpipe/schedules/check.py verify_plan": "it repeats an error that says what to do",
    "fleetpipe/schedules/forms/text.py _read_header": "it repeats an error that says what to do",
    "fleetpipe/schedules/forms/text.py _read_edges": "it repeats an error that says what to do",
    "fleetpipe/schedules/registry.py verify_rows": "it repeats an error that says what to do",
    "fleetpipe/transport/wire/structure.py _unpack": "the inbox raises another that says it",
    "fleetpipe/transport/wire/structure.py check": "the inbox raises another that says it",
    "static/run/static_stage.py _nothing_fed": "each batch sets its feed: nothing users can change",
}


@cache
def trees() -> dict[Path, ast.Module]:
    """Returns what the files of the package say, by their paths."""
    return {path.relative_to(ROOT): tree(path) for path in sources(ROOT)}


@cache
def family() -> frozenset[str]:
    """Returns the names of the errors of ``fleetpipe.errors`` and of all classes made of them."""
    names = {"FleetPipeError"}
    classes = [
        n for says in trees().values() for n in ast.walk(says) if isinstance(n, ast.ClassDef)
    ]
    while True:
        more = {c.name for c in classes if names & {ast.unparse(base) for base in c.bases}}
        if more <= names:
            return frozenset(names)
        names |= more


def made(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yields each error that is made below a node, and the function in which it is."""
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from made(child, child.name if inside else function)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in family():
        yield function, node


def stands_in(path: Path, room: str) -> bool:
    return any(path.with_suffix("").is_relative_to(part) for part in room.split())


def without_fix(room: str) -> dict[str, int]:
    """Returns the lines of the errors of a room that do not say what to do."""
    return {
        f"{path} {function}": call.lineno
        for path, says in trees().items()
        if stands_in(path, room)
        for function, call in made(says)
        if not {"fix", None} & {keyword.arg for keyword in call.keywords}
    }


def test_the_family_is_found() -> None:
    public = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name in public if name.endswith("Error")} <= family()
    assert "NotWrapped" in family()


@pytest.mark.parametrize("room", ROOMS)
def test_every_error_says_what_to_do(room: str) -> None:
    for part in room.split():
        assert any(stands_in(path, part) for path in trees()), part
    bare = without_fix(room)
    assert {place: line for place, line in bare.items() if place not in REASONS} == {}


def test_every_reason_is_needed() -> None:
    assert REASONS.keys() - {place for room in ROOMS for place in without_fix(room)} == set()


def test_an_error_that_no_restart_mends_is_one_of_text_packages_or_what_is_asked_for() -> None:
    lasting = ConfigError("x"), CheckpointError("x", permanent=True), SyntaxError()
    passing = CheckpointError("x"), PeerFailed("x"), ConfigError("x", permanent=False), OSError()
    absent = ModuleNotFoundError(), ImportError("cannot import name 'x' from 'y'")
    assert all(map(is_permanent, (*lasting, *absent, BoundaryError("x"), UsageError("x"))))
    assert not any(map(is_permanent, (*passing, ImportError(), KeyError())))

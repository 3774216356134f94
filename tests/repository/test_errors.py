"""Every error of the family tells the reader what to do next."""

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

#: A package whose errors no user sees: the job goes on without healing.
UNSEEN = "fleetpipe/contrib/healing/"

#: Where an error has no ``fix``, by file and function, and why.
REASONS = {
    "fleetpipe/contrib/ray/launch.py run_script": "the script has said what went wrong",
    "fleetpipe/contrib/text/__init__.py __init__": "the cause is the package's own",
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


def test_the_family_is_found() -> None:
    public = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name in public if name.endswith("Error")} <= family()
    assert "NotWrapped" in family()


def test_every_error_says_what_to_do_or_there_is_a_reason_why_not() -> None:
    bare = {
        f"{path} {function}"
        for path, says in trees().items()
        for function, call in made(says)
        if not {"fix", None} & {keyword.arg for keyword in call.keywords}
    }
    assert {place for place in bare if not place.startswith(UNSEEN)} == set(REASONS)


def test_an_error_that_no_restart_mends_is_one_of_text_packages_or_what_is_asked_for() -> None:
    lasting = ConfigError("x"), CheckpointError("x", permanent=True), SyntaxError()
    passing = CheckpointError("x"), PeerFailed("x"), ConfigError("x", permanent=False), OSError()
    absent = ModuleNotFoundError(), ImportError("cannot import name 'x' from 'y'")
    assert all(map(is_permanent, (*lasting, *absent, BoundaryError("x"), UsageError("x"))))
    assert not any(map(is_permanent, (*passing, ImportError(), KeyError())))

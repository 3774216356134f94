"""Paddle's private names stand in ``fleetpipe/paddle_api`` and nowhere else in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.check_types import tree
from tests.test_house import modules

pytestmark = pytest.mark.once

#: Paddle's modules that no user is meant to import.
INTERNAL = ("paddle.base", "paddle.framework.core")
#: Private names of others than Paddle, Python's own that only look private, and own names that
#: another file uses or that are put into ``__dict__``.
ALLOWED = {
    *("_asdict", "_exit", "_field_defaults", "_fields", "_make", "_replace"),  # named tuples, os
    *("_Unpickler", "_inheriting"),  # pickle, multiprocessing
    *("_getframe", "_actions", "_option_string_actions", "_fmt"),  # sys, argparse, logging
    *("_bit_generator", "_run_exitfuncs"),  # NumPy's, atexit
    *("_resources_per_worker_not_none", "_create_default_callbacks", "_base_exc"),  # Ray's
    *("_example", "_loss_fn", "_model", "_prepare_training", "_vp"),
    *("_replay", "_fleetpipe_items", "_fleetpipe_started"),
}
#: Files that say which of Paddle's names scripts of older versions, or libraries, use.
TABLES = ("fleetpipe.contrib.fluid",)
#: Functions that take names of attributes as text; ``shows`` takes paths of them.
ACCESS = {"getattr", "setattr", "hasattr", "delattr", "shows"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and name[1:2] not in ("", "_")


def definitions(of: ast.Module) -> Iterator[str]:
    """Yields the names that a file defines, and those that its objects get on themselves."""
    for node in ast.walk(of):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_self(node):
            yield node.attr


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


@cache
def everywhere() -> frozenset[str]:
    outside = [path for name, path in modules().items() if is_outside(name)]
    return frozenset(name for path in outside for name in definitions(tree(path)))


def is_outside(module: str) -> bool:
    return not module.startswith("fleetpipe.paddle_api.")


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def foreign(of: ast.Module) -> Iterator[str]:
    """Yields the private names of others that a file uses, with their lines."""
    here = set(definitions(of))
    for node in ast.walk(of):
        name = ""
        if isinstance(node, ast.Import):
            name = next((one.name for one in node.names if one.name.startswith(INTERNAL)), "")
        elif isinstance(node, ast.ImportFrom) and node.module:
            paths = [f"{node.module}.{one.name}" for one in node.names]
            name = next((path for path in paths if path.startswith(INTERNAL)), "")
        elif isinstance(node, ast.Attribute) and dotted(node) in INTERNAL:
            name = dotted(node)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            names = everywhere() if on_self(node) else here
            name = "" if node.attr in ALLOWED or node.attr in names else node.attr
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ACCESS:
            values = [*node.args, *(one.value for one in node.keywords)]
            texts = [str(one.value) for one in values if isinstance(one, ast.Constant)]
            parts = [part for text in texts for part in text.split(".") if is_private(part)]
            names = everywhere() if dotted(node.func) == "shows" else here
            name = next((part for part in parts if part not in ALLOWED and part not in names), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value if node.value.startswith(INTERNAL) else ""
        if name:
            yield f"{node.lineno}: {name}"


def test_no_other_file_names_what_is_private_to_paddle() -> None:
    outside = [name for name in modules() if is_outside(name) and not name.startswith(TABLES)]
    named = {name: list(foreign(tree(modules()[name]))) for name in outside}
    assert len(named) > 300
    assert {name: names for name, names in named.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from paddle.base import core",
        "import paddle.base.framework",
        "x = paddle.base.dygraph",
        "optimizer._accumulators",
        "self._sub_layers",
        'getattr(layer, "_sub_layers")',
        'monkeypatch.setattr(layer, "_forward_pre_hooks", {})',
        'module = "paddle.base.core"',
        'shows("wrapped", learning_rate="wrapped._learning_rate")',
    ],
)
def test_each_way_to_name_one_is_seen(line: str) -> None:
    assert list(foreign(ast.parse(line)))

"""The words of the code: names say what they hold, and one class name stands for one thing.

The list is that of docs/architecture.md's glossary, turned around: participles and pronouns that
name nothing, and words of an earlier dialect that have a term of the field's today.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.check_types import tree
from tests.test_house import modules

#: What no module, class, function, parameter, attribute or variable is called, underscores aside.
NO_NAMES = frozenset(
    {
        *("asked", "door", "found", "given", "house", "kin", "known", "life", "others", "own"),
        *("room", "saying", "theirs", "told"),
    }
)

#: What no docstring, comment or message of the package says; each has a term of the field's.
NO_PHRASES = ("lasting name",)

#: Fields that have the name that a file of a checkpoint gives them.
IN_FILES = {("fleetpipe.checkpoint.contents.parts", "others")}

#: Class names that stand for two things, each with why.
TWICE = {
    "DataLoader": "Paddle has one for each graph mode, and these stand in their places",
    "Engine": "ColossalAI's, beside ours",
    "Model": "MindSpore's and paddle.Model's",
    "ParallelMode": "ColossalAI's and MindSpore's",
    "Timer": "ColossalAI's, beside ours",
}

#: Packages in which a function says with a verb or a noun what it does or returns.
VERBS = (
    *("schedules", "partition", "transport", "engine", "mesh", "job", "paddle_api", "profiling"),
    *("io", "static", "capture", "contrib", "dygraph", "fit", "checkpoint", "parity", "launch"),
    *("fleet", "fleet_files", "arguments", "atomic_file", "cli", "config", "extras", "log"),
)

#: Bare participles, and those functions of ``VERBS`` that keep one.
PARTICIPLE = re.compile(r"_?([a-z]+ed|begun|found|held|kept|left|made|shown|taken|told|written)")
PARTICIPLES = {
    *("_called", "balanced", "mapped", "marked", "recosted", "reordered", "replaced", "weighted"),
}


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the names that a file gives, with their lines."""
    yield 0, path.stem
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_names_say_what_they_hold() -> None:
    assert not [
        f"{path}:{line}: {word}"
        for name, path in modules().items()
        for line, word in names(path)
        if word.strip("_").lower() in NO_NAMES and (name, word) not in IN_FILES
    ]


def test_texts_use_the_fields_terms() -> None:
    assert not [
        f"{path}: {phrase}"
        for path in modules().values()
        for text in [" ".join(path.read_text(encoding="utf-8").split())]
        for phrase in NO_PHRASES
        if re.search(rf"\b{phrase}s?\b", text)
    ]


def test_functions_are_not_named_by_a_participle() -> None:
    assert not [
        f"{path}:{node.lineno}: {node.name}"
        for name, path in modules().items()
        if f"{name}.".startswith(tuple(f"fleetpipe.{package}." for package in VERBS))
        if name != "fleetpipe.mesh.parts"
        for body in (
            tree(path).body,
            *(c.body for c in tree(path).body if isinstance(c, ast.ClassDef)),
        )
        for node in body
        if isinstance(node, ast.FunctionDef) and PARTICIPLE.fullmatch(node.name)
        if (body is tree(path).body or node.name.startswith("_")) and node.name not in PARTICIPLES
    ]


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in TWICE} == {}
    assert set(TWICE) <= set(twice)

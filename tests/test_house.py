"""The layers of fleetpipe: which file may import which, late imports and those for types included.

``LAYERS`` is read from the lowest up. Each string is a package: files and folders of fleetpipe,
without ``.py``. A file imports its own package and lower layers, never another package of its
layer.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.check_types import tree

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fleetpipe"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors aliases json_value paddle_types version log representation extras systems",),
    ("numerics paddle_api arguments atomic_file",),
    (
        "schedules/action schedules/placement schedules/costs schedules/rows",
        "partition",
    ),
    ("schedules/families", "schedules/explain"),
    ("schedules/simulation",),
    ("schedules/check schedules/envelope", "schedules/forms"),
    ("schedules/api",),
    ("schedules/registry",),
    ("schedules/__init__",),
    (
        *("schedules/schedule_commands", "profiling", "transport", "fleet_files"),
        "static/graph",
    ),
    ("mesh", "dygraph/function_code"),
    (
        *("config", "engine", "job", "static/cut"),
        "dygraph/nest dygraph/layer_kinds dygraph/random_keys dygraph/gradients",
    ),
    (
        *("dygraph/backward", "dygraph/tensor_parallel", "static/ir", "static/run"),
        *("io", "checkpoint"),
    ),
    ("dygraph/sums",),
    ("dygraph/batch", "dygraph/layers", "dygraph/optimizer", "static/pipeline_programs"),
    ("dygraph/state", "static/saved_state"),
    ("dygraph/model", "static/entry"),
    ("dygraph/observe", "static/__init__ static/reference"),
    ("dygraph/train",),
    ("dygraph/__init__",),
    ("compare/__init__ compare/differences",),
    (
        "parity/__init__ parity/beside parity/parity_report parity/recorded_values"
        " parity/reference parity/session",
    ),
    ("capture",),
    ("fleet",),
    ("launch cli __main__",),
    ("fit callbacks",),
    ("compare",),
    ("parity/parity_command",),
    ("contrib/__init__",),
    ("contrib/pictures",),
    (
        "contrib/clusters",
        *("contrib/starter", "contrib/formats", "contrib/program_ir", "contrib/fluid"),
        *("contrib/pipelining", "contrib/callbacks", "contrib/kept_state"),
        *("contrib/slurm", "contrib/guards", "contrib/fast_leaves", "contrib/shadow"),
        *("contrib/experts", "contrib/slices", "contrib/sequences", "contrib/vocabulary"),
        *("contrib/lora", "contrib/text"),
    ),
    ("contrib/view", "contrib/locator", "contrib/generation", "contrib/healing"),
    ("contrib/compat", "contrib/ray"),
    ("contrib/doctor",),
    ("__init__",),
)

#: The three rings, from the inside: a file imports its own ring and inner ones. What is in neither
#: list is of the standard ring.
CORE = (
    *("errors", "aliases", "json_value", "paddle_types", "version", "log", "representation"),
    *("extras", "systems", "numerics", "paddle_api", "arguments", "atomic_file", "config"),
    *("schedules", "partition", "transport", "fleet_files", "mesh", "engine", "job", "dygraph"),
    "fleet",
)
#: In a folder of the core, and of the standard ring.
STANDARD = (
    *("schedules/schedule_commands", "dygraph/observe/layer_meter", "dygraph/observe/measuring"),
    "dygraph/observe/profile",
    *("engine/step_meter", "fleet/gpu_only", "job/run_files"),
    *("paddle_api/launcher", "paddle_api/loading", "schedules/families/variants"),
)
EXTRAS = ("contrib", "paddle_api/pipelining", "paddle_api/rehearsal")
#: Faces, which name the types of what they load late.
FACES = (
    *("fleetpipe.__init__", "fleetpipe.callbacks", "fleetpipe.dygraph.__init__"),
    "fleetpipe.io.__init__",
    "fleetpipe.schedules.forms.__init__",
)
#: A method of the core's whose result is a value of the standard ring.
RETURNS = ("fleetpipe.dygraph.train.pipeline_parallel", "fleetpipe.profiling.__init__")

#: Folders of which every file has a layer, and a file: they import nothing but what stands here.
CLOSED = {
    "schedules": "arguments errors extras json_value representation schedules",
    "partition": "errors partition representation",
    "profiling": "arguments errors extras json_value partition profiling representation schedules",
    "static": "__init__ aliases atomic_file config engine errors extras fleet_files job mesh"
    " numerics paddle_api representation schedules static transport",
}
#: The libraries that they may import.
LIBRARIES = {
    "schedules": ["matplotlib"],
    "partition": [],
    "profiling": ["matplotlib", "numpy"],
    "static": ["numpy", "paddle"],
}


@cache
def modules() -> dict[str, Path]:
    """Returns the files of the package by dotted name; a package's own ends in ``__init__``."""
    folders = {PACKAGE: PACKAGE, "dygraph": f"{PACKAGE}/dygraph", "static": f"{PACKAGE}/static"}
    return {
        f"{place}/{path.relative_to(ROOT / folder).with_suffix('')}".replace("/", "."): path
        for folder, place in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }


@cache
def imports(name: str) -> tuple[str, ...]:
    """Returns what a module imports, wherever in the file: modules of the package, or any other."""
    return tuple(_imports(name))


def _imports(name: str) -> Iterator[str]:
    for node in ast.walk(tree(modules()[name])):
        if isinstance(node, ast.Import):
            yield from (module_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            base = node.module or ""
            inside = [f"{base}.{alias.name}" for alias in node.names]
            yield from {
                module_of(target) if module_of(target) in modules() else module_of(base)
                for target in inside
            }


def module_of(target: str) -> str:
    """Returns the module of the package that ``target`` is, or ``target`` itself."""
    package = f"{target}.__init__"
    return package if package in modules() else target


@cache
def place(name: str) -> tuple[int, str] | None:
    """Returns the layer of a module and its package; None where it has none yet."""
    path = name.replace(".", "/") + "/"
    for layer, packages in enumerate(LAYERS):
        for package in packages:
            if any(path.startswith(f"{PACKAGE}/{part}/") for part in package.split()):
                return layer, package
    return None


def ring(name: str) -> int:
    """Returns the ring of a module: 0 core, 1 standard, 2 extras."""
    path = f"{name.replace('.', '/').removeprefix(PACKAGE + '/')}/"
    if path.startswith(tuple(f"{part}/" for part in EXTRAS)):
        return 2
    if path.startswith(tuple(f"{part}/" for part in STANDARD)):
        return 1
    return 0 if path.startswith(tuple(f"{part}/" for part in CORE)) else 1


PLACED = sorted(name for name in modules() if place(name))


def test_a_file_imports_its_own_package_and_lower_layers() -> None:
    for name in PLACED:
        here = place(name)
        assert here is not None
        for target in imports(name):
            if name in FACES or (name, target) == RETURNS:
                continue
            there = place(target)
            assert there is None or there == here or there[0] < here[0], (
                f"{name} of layer {here[0]} imports {target} of layer {there[0]}"
            )


def test_a_ring_imports_inner_rings_alone() -> None:
    for name in PLACED:
        for target in imports(name):
            if target in modules() and name not in FACES and (name, target) != RETURNS:
                assert ring(target) <= ring(name), f"{name} imports {target}"


def test_the_drawing_has_every_package_in_its_ring() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = next(text for text in page.split("```") if "EXTRAS" in text)
    *_, extras, standard, core = re.split(r"^[A-Z]+[:,].*$", drawing, flags=re.MULTILINE)
    drawn = [set(re.findall(r"(?<= )(\w+)/ ", text)) for text in (core, standard, extras)]
    packages: list[set[str]] = [set(), set(), set()]
    for name in modules():
        folders = name.split(".")[1:-1]
        in_a_group = len(folders) == 2 and folders[0] in ("contrib", "dygraph", "static")
        if name.endswith(".__init__") and (len(folders) == 1 or in_a_group):
            packages[ring(name.removesuffix(".__init__"))].add(folders[-1])
    packages[2].remove("contrib")
    assert drawn == packages, "expected: docs/architecture.md has each package, in its ring"


def test_every_extra_says_what_it_is_for_and_where_its_tests_are() -> None:
    extras = [path.parent for path in (ROOT / PACKAGE / "contrib").glob("*/__init__.py")]
    for extra in extras:
        text = (extra / "README.md").read_text(encoding="utf-8")
        tests = re.findall(r"`(tests/[\w/.]+)`", text)
        assert text.count("\n") <= 14, extra
        assert tests, extra
        assert all((ROOT / path).exists() for path in tests), extra


def test_what_is_loaded_by_name_is_there() -> None:
    names = set(modules()) | {name.removesuffix(".__init__") for name in modules()}
    asked = 0
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "extra":
                asked += 1
                extra = ast.literal_eval(node.args[0])
                assert f"{PACKAGE}.contrib.{extra}" in names, f"{name} asks for {extra}"
    assert asked > 20


#: Folders of tests of which ``make check`` runs nothing, or nothing else.
OUTSIDE = ("contrib", "libraries", "processes")


def test_a_red_extra_stops_no_test_of_an_inner_ring() -> None:
    nodes = ast.walk(tree(modules()["fleetpipe.contrib.__init__"]))
    tables = [node.value for node in nodes if isinstance(node, ast.Assign)]
    shorter = next(ast.literal_eval(table) for table in tables if isinstance(table, ast.Dict))
    extras = tuple(f"{path}." for path in ("fleetpipe.contrib", *shorter))
    for path in (ROOT / "tests").rglob("*.py"):
        if path.relative_to(ROOT).parts[1] in OUTSIDE:
            continue
        for node in ast.walk(tree(path)):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
                assert not f"{base}{alias.name}.".startswith(extras), f"{path} imports {alias.name}"


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name: [target for target in imports(name) if target in modules()] for name in PLACED}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", CLOSED)
def test_a_closed_folder_imports_nothing_else(folder: str) -> None:
    inside = [name for name in modules() if f"{name}.".startswith(f"{PACKAGE}.{folder}.")]
    inside = [name for name in inside if name not in FACES]
    assert inside
    allowed = [f"{PACKAGE}.{part}" for part in CLOSED[folder].split()] + LIBRARIES[folder]
    for name in inside:
        for target in imports(name):
            standard = target.split(".")[0] in sys.stdlib_module_names
            assert standard or f"{target}.".startswith(tuple(f"{path}." for path in allowed)), (
                f"{name} imports {target}"
            )


def test_every_file_has_a_place() -> None:
    assert set(modules()) == set(PLACED)


def test_every_package_is_there() -> None:
    for packages in LAYERS:
        for part in " ".join(packages).split():
            assert any(f"{PACKAGE}/{part}/" in name.replace(".", "/") + "/" for name in PLACED), (
                part
            )


#: Modules in a folder, its ``__init__`` aside.
MODULES_IN_A_FOLDER = 14
#: Folders that have more; each figure may only fall.
LARGER = {"fleetpipe": 17, "tests": 15}


def test_a_folder_is_one_subject() -> None:
    files = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for top in (PACKAGE, "dygraph", "static", "tests", "benchmarks")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py" and path.resolve() == path
    )
    assert len(files) > 60
    too_large = {
        folder: count
        for folder, count in files.items()
        if count > LARGER.get(folder, MODULES_IN_A_FOLDER)
    }
    assert too_large == {}, "expected: at most 14 modules; move those of one subject to a folder"


#: The most files of the package, and of its tests.
MOST_FILES, MOST_FILES_OF_TESTS = 400, 330
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def lines_of_code(path: Path) -> int:
    """Returns the lines that have something beside comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(code)


def test_there_are_few_files(capsys: pytest.CaptureFixture[str]) -> None:
    tests = [*(ROOT / "tests").rglob("*.py")]
    parts = [
        (title, [path for name, path in modules().items() if ring(name) == number])
        for number, title in enumerate(("core", "standard", "extras"))
    ]
    with capsys.disabled():
        print()
        for title, files in (*parts, ("package", [*modules().values()]), ("tests", tests)):
            print(f"{title}: {len(files)} files, {sum(map(lines_of_code, files)):,} lines of code")
    assert len(modules()) <= MOST_FILES
    assert len(tests) <= MOST_FILES_OF_TESTS


def test_a_package_names_files_that_are_there() -> None:
    for name, path in modules().items():
        text = ast.get_docstring(tree(path)) or "" if path.name == "__init__.py" else ""
        for file in re.findall(r"``(\w+\.py)``", text):
            assert any(path.parent.rglob(file)), f"{name} has no {file}"

"""How the code is written: its words say what they hold, and a type checker sees all of it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetpipe.paddle_api import paddle_fleet
from tests.check_types import check, tree
from tests.fixtures import Capture, Patch
from tests.launching import ROOT
from tests.test_house import modules

pytestmark = pytest.mark.once


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
    *("balanced", "mapped", "marked", "recosted", "reordered", "replaced", "weighted"),
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


# By the cache of `make types` only the scripts are left to check.
MYPY = [
    "--strict",
    "--config-file",
    str(ROOT / "setup.cfg"),
    "--cache-dir",
    str(ROOT / ".mypy_cache" / sys.platform),
]
#: A line's mistake stands behind it, as the line that it becomes.
SCRIPT = (ROOT / "tests" / "style" / "users_script.txt").read_text(encoding="utf-8")
PADDLES = (paddle_fleet, paddle_fleet.meta_parallel)
MISTAKES = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# wrong:" in line]


#: Imports of fleetpipe's as pages and examples write them.
IMPORT = re.compile(r"^(?:from fleetpipe\b\S* import [\w ,]+|import fleetpipe\b\S*)$", re.MULTILINE)


def said_of(scripts: list[Path], environment: Path) -> list[str]:
    """Returns mypy's lines about scripts of a folder, run with the packages of ``environment``."""
    python = ["--python-executable", str(environment / "bin" / "python")]
    names = [script.name for script in scripts]
    command = [sys.executable, "-m", "mypy", *MYPY, *python, *names]
    folder = scripts[0].parent
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def said_by_pyright(scripts: list[Path], environment: Path) -> list[tuple[str, int]]:
    """Returns the scripts and lines in which pyright finds errors."""
    pytest.importorskip("basedpyright", reason="pyright is an extra (dev) of its own weight")
    folder = scripts[0].parent
    names = [script.name for script in scripts]
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "include": names})
    )
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath"]
    command.append(str(environment / "bin" / "python"))
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    said = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in said
        if one["severity"] == "error"
    ]


def environment_of(folder: Path, *packages: str) -> Path:
    """Makes an environment that has fleetpipe as it is installed, and other folders' packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "all.pth").write_text("\n".join([str(ROOT), *packages]))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with this environment's packages."""
    folder = tmp_path_factory.mktemp("types") / "environment"
    return environment_of(folder, sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A user's script without mistakes and with them, Paddle's names, imports of pages."""
    folder = tmp_path_factory.mktemp("scripts")
    right, wrong, names = (folder / f"{name}.py" for name in ("right", "wrong", "names"))
    right.write_text(SCRIPT)
    wrong.write_text(re.sub(r"^( *).*# wrong: (.*)$", r"\1\2", SCRIPT, flags=re.MULTILINE))
    public = {module: [name for name in dir(module) if name[0] != "_"] for module in PADDLES}
    lines = [f"print({m.__name__.rpartition('.')[2]}.{n})" for m in public for n in public[m]]
    heading = "from fleetpipe import fleet\nfrom fleetpipe.fleet import meta_parallel\n"
    names.write_text(heading + "\n".join(lines))
    documented = folder / "documented.py"
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), ROOT / "README.md"]
    found = {line for page in pages for line in IMPORT.findall(page.read_text(encoding="utf-8"))}
    assert len(found) > 60
    # Each by itself: two pages may give one name to different things.
    each = [
        f"def page_{number}() -> None:\n    {line}" for number, line in enumerate(sorted(found))
    ]
    documented.write_text("\n".join(each))
    return [right, wrong, names, documented]


@pytest.fixture(scope="module")
def said(scripts: list[Path], environment: Path) -> list[str]:
    """What mypy says of these, and of the README's first script without and with mistakes."""
    pytest.importorskip("mypy", reason="only the environment of make test has it")
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import paddle\n.*?)```", text, flags=re.DOTALL)
    first, misspelt = (scripts[0].with_name(f"{name}.py") for name in ("first", "misspelt"))
    first.write_text(code)
    misspelt.write_text(
        code.replace("model.train_batch(", "model.trian_batch(")
        + "reveal_type(optimizer)\n"
        + "LayerDesc(nn.functional.relu)\n"
        + "PipelineLayer(layers, topolgy=topology)\n"
    )
    return said_of([*scripts, first, misspelt], environment)


def test_a_misspelt_method_is_found_and_the_first_script_is_right(said: list[str]) -> None:
    assert not [line for line in said if line.startswith("first.py")]
    of_misspelt = [line for line in said if line.startswith("misspelt.py")]
    assert len([line for line in of_misspelt if ": error: " in line]) == 3
    text = "\n".join(of_misspelt)
    assert '"PipelineParallel" has no attribute "trian_batch"; maybe "train_batch"?' in text
    assert 'Revealed type is "fleetpipe.dygraph.optimizer.optimizer.PipelineOptimizer"' in text
    assert 'Argument 1 to "LayerDesc" has incompatible type' in text
    assert 'Unexpected keyword argument "topolgy" for "PipelineLayer"' in text


def test_mypy_finds_ten_mistakes_of_a_user_and_nothing_where_there_are_none(
    said: list[str],
) -> None:
    lines = [line for line in said if ": error: " in line and not line.startswith("misspelt.py")]
    found = {(line.split(":")[0], int(line.split(":")[1])) for line in lines}
    assert found == {("wrong.py", number) for number in MISTAKES}, "\n".join(lines)
    assert len(MISTAKES) == 10


def test_pyright_finds_them_too(scripts: list[Path], environment: Path) -> None:
    found = said_by_pyright(scripts, environment)
    assert set(found) == {("wrong.py", number) for number in MISTAKES}


def test_without_paddle_the_names_of_fleetpipe_are_checked(
    scripts: list[Path], tmp_path: Path
) -> None:
    found = said_by_pyright(scripts[1:2], environment_of(tmp_path / "without"))
    lines = [SCRIPT.splitlines()[number - 1].partition("# wrong: ")[2] for _, number in found]
    for mistake in ("worker_indx", "AFTER", "keep=2", "train_batch(1, 2)", "Modle"):
        assert any(mistake in line for line in lines), mistake


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy knows of the standard library, once for all."""
    pytest.importorskip("mypy", reason="only the environment of make test has it")
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def copied(tmp_path: Path, cache: Path, monkeypatch: Patch) -> Path:
    """A small correct package in the layout of this one."""
    monkeypatch.setenv("MYPY_CACHE_DIR", str(cache))
    for name in ("fleetpipe", "dygraph", "static"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("def one() -> int:\n    return 1\n")
    for name in ("dygraph", "static"):
        (tmp_path / "fleetpipe" / name).symlink_to(f"../{name}")
    (tmp_path / "setup.cfg").write_text("[mypy]\n")
    return tmp_path


def test_an_error_in_a_linked_folder_is_found(copied: Path, capfd: Capture) -> None:
    (copied / "dygraph" / "wrong.py").write_text("from fleetpipe import one\nx: str = one()\n")
    assert check(copied) == 1
    assert "fleetpipe/dygraph/wrong.py:2: error" in capfd.readouterr().out


def test_a_file_that_mypy_leaves_out_is_an_error(copied: Path, capfd: Capture) -> None:
    (copied / "setup.cfg").write_text("[mypy]\nexclude = hidden\n")
    (copied / "fleetpipe" / "hidden.py").write_text("x: str = 1\n")
    assert check(copied) == 1
    assert "checked 3 of 4 source files; is an __init__.py missing?" in capfd.readouterr().out

"""``fleetpipe run`` and ``fleetpipe.install()``: what a script finds in the place of Paddle.

Libraries find every name of the table on the page about them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import paddle
import pytest
from paddle.distributed import fleet as theirs

import fleetpipe
from fleetpipe import fleet
from fleetpipe.arguments import Module
from fleetpipe.cli import main
from fleetpipe.errors import ConfigError, PeerFailed
from fleetpipe.fleet.overlay import OVERLAYS
from fleetpipe.job import attempt_files
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles
from tests.check_types import sources, tree
from tests.fixtures import Capture, Launch, Patch
from tests.launching import ROOT, command
from tests.pipelines import job, pipeline

PADDLES = "paddle.distributed.fleet"
LAUNCHED = ROOT / "fleetpipe" / "launch" / "rank_main.py"


def found_by(code: str) -> dict[str, Any]:
    """Runs ``code`` with fleetpipe in the place of Paddle and returns its names."""
    names: dict[str, Any] = {}
    with in_place_of_paddles():
        exec(code, names)
    return names


@pytest.mark.parametrize(
    "code",
    [
        "import paddle.distributed.fleet as found",
        "from paddle.distributed import fleet as found",
        "import paddle.distributed as dist; found = dist.fleet",
        "import paddle.distributed.fleet; found = paddle.distributed.fleet",
        "import importlib; found = importlib.import_module('paddle.distributed.fleet')",
    ],
)
def test_every_way_to_import_fleet_finds_fleetpipes(code: str) -> None:
    assert found_by(code)["found"] is fleet
    assert found_by(f"from {PADDLES} import *")["meta_parallel"] is fleet.meta_parallel
    assert found_by("import paddle.distributed; x = paddle.distributed.fleet.init")["x"] is (
        fleet.init
    )


@pytest.mark.parametrize("path", OVERLAYS)
def test_a_module_of_the_table_is_found_and_paddles_is_back_afterwards(path: str) -> None:
    name = f"{PADDLES}.{path}"
    before = sys.modules.get(name)
    found = found_by(f"import importlib; found = importlib.import_module({name!r})")["found"]
    assert found is importlib.import_module(f"fleetpipe.fleet.{path}")
    assert sys.modules.get(name) is before


def test_what_fleetpipe_does_not_define_stays_paddles() -> None:
    names = found_by(
        f"from {PADDLES}.utils import recompute\n"
        f"from {PADDLES}.base.topology import CommunicateTopology\n"
        f"from {PADDLES} import UserDefinedRoleMaker, fleet\n"
        f"import {PADDLES}.utils.hybrid_parallel_util as util\n"
    )
    assert names["CommunicateTopology"] is theirs.CommunicateTopology
    assert names["UserDefinedRoleMaker"] is theirs.UserDefinedRoleMaker
    assert names["fleet"] is theirs.fleet
    util = f"{PADDLES}.utils.hybrid_parallel_util"
    assert names["util"] is importlib.import_module(util)


def test_a_module_of_paddles_that_nobody_loaded_yet_is_found_once(monkeypatch: Patch) -> None:
    before = theirs.cloud_utils
    monkeypatch.setattr(fleet, "cloud_utils", before)
    for name in (f"{PADDLES}.cloud_utils", "fleetpipe.fleet.cloud_utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = found_by(
        f"import {PADDLES}.cloud_utils as first\n"
        "import fleetpipe.fleet.cloud_utils\n"
        f"from {PADDLES} import cloud_utils as second\n"
    )
    assert names["first"] is not before
    assert names["first"] is names["second"]
    assert names["first"].__file__ == before.__file__
    with pytest.raises(ModuleNotFoundError, match=r"paddle\.distributed\.fleet\.nonsense"):
        found_by(f"import {PADDLES}.nonsense")


def test_afterwards_paddles_modules_are_back() -> None:
    finders = list(sys.meta_path)
    with pytest.raises(ZeroDivisionError):
        found_by(f"import {PADDLES}\n1 / 0")
    assert sys.modules[PADDLES] is theirs is paddle.distributed.fleet
    assert sys.modules[f"{PADDLES}.meta_parallel"] is theirs.meta_parallel
    assert sys.meta_path == finders


def test_fleetpipe_imports_paddles_fleet_before_anything_stands_in_its_place() -> None:
    """What is imported within a function would find fleetpipe's own modules while a script runs."""
    late = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources(ROOT)
        for function in ast.walk(tree(file))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and _reaches_fleet(node)
    ]
    assert late == []


def _reaches_fleet(node: ast.Import | ast.ImportFrom) -> bool:
    module = getattr(node, "module", None)
    names = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
    return any(f"{name}.".startswith(f"{PADDLES}.") for name in names)


SHOW = """
import sys
import helper
def told(): return [__name__, __file__, sys.argv, sys.path[0], __doc__, __spec__, __package__]
print(told(), sys.modules["__main__"].told is told, helper.__file__)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(7)", 7), ("sys.exit(False)", 0), ("raise OSError('no such thing')", 1)],
)
def test_a_script_runs_as_under_python(launch: Launch, end: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("")
    (tmp_path / "scripts" / "show.py").write_text(SHOW.format(end=end))
    words = ["scripts/show.py", "--steps", "3", "-h"]
    told, returncode = done([sys.executable, "-u", *words], tmp_path)
    env = {attempt_files.FOLDER: str(tmp_path)}
    found = launch(LAUNCHED, None, args=["run", *words], cwd=tmp_path, env=env, check=False)
    assert found.returncode == returncode == code
    assert (
        attempt_files.reported_exit_code(tmp_path, 0) == code
    )  # what the launcher of several ranks goes by
    assert found.logs[0].endswith(told)
    if code == 7:
        command = [sys.executable, "-u", "-W", "ignore", "-m", "fleetpipe", "run", *words]
        by_command, returncode = done(command, tmp_path)
        assert returncode == 7
        assert by_command.endswith(told)


def done(command: list[str], folder: Path) -> tuple[str, int]:
    """Runs a command in a folder; returns what it wrote, and its exit code."""
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return ended.stdout.strip(), ended.returncode


@pytest.mark.once_for("failing1")
@pytest.mark.processes
@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_an_error_is_shown_once(tmp_path: Path, failing: tuple[int, ...]) -> None:
    code = f"""
        import os, time
        if int(os.environ["PADDLE_TRAINER_ID"]) in {failing}:
            raise ValueError("no such batch")
        time.sleep(30)
    """
    (tmp_path / "train.py").write_text(dedent(code))
    command = [sys.executable, "-m", "fleetpipe", "run", "--nproc", "2", "train.py"]
    output, returncode = done(command, tmp_path)
    assert returncode == 1
    assert output.count("Traceback (most recent call last)") == 1
    assert output.count("\nValueError: no such batch") == 1
    named = "fleetpipe: rank 1 raised ValueError: no such batch\n"
    assert output.count(named) == (failing == (1,))


@pytest.mark.parametrize("brief", ["rank 1 raised x", None])
def test_an_error_of_another_rank_is_a_line(
    tmp_path: Path, brief: str | None, monkeypatch: Patch, capsys: Capture
) -> None:
    error = PeerFailed("rank 1 raised: x", got="from rank 1")
    error.brief = brief
    monkeypatch.setattr(script, "execute", Mock(side_effect=error))
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    assert script.execute_to_the_end(tmp_path / "train.py", []) == 1
    shown = capsys.readouterr().err
    assert shown == "fleetpipe: rank 1 raised x\n" if brief else "from rank 1" in shown


def test_a_missing_script_and_a_wrong_number_are_refused(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", str(tmp_path / "missing.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--nproc", "0", str(script)]) == 2
    assert "invalid number of processes: '0'; give 1 to 1024" in capsys.readouterr().err
    assert main(["run", str(script)]) == 0


@pytest.mark.parametrize("command", ["run", "launch"])
def test_ranks_fork_or_spawn(
    command: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("FLEETPIPE_START", "spwan")
    assert main([command, "--nproc", "2", str(tmp_path / "train.py")]) == 2
    assert "FLEETPIPE_START chooses how the ranks start" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["module_of_jobs.train", "package_of_jobs"])
def test_a_module_runs_as_by_python(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, name: str
) -> None:
    shown = "__name__, __package__, __spec__.name, __file__, __cached__, __loader__.name"
    folder = tmp_path / name.partition(".")[0]
    folder.mkdir()
    for file in ("train", "__main__"):
        (folder / f"{file}.py").write_text(f"import sys; print({shown}, sys.path[0], sys.argv)")
    (folder / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    before = sys.argv, sys.path[0], sys.modules["__main__"]
    assert main(["run", "-m", name, "--lr", "1", "-m"]) == 0
    assert before == (sys.argv, sys.path[0], sys.modules["__main__"])
    by_python = subprocess.run(
        [sys.executable, "-m", name, "--lr", "1", "-m"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert capsys.readouterr().out == by_python.stdout


def test_a_missing_module_is_refused(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--nproc", "2", "-m", "nowhere.train"]) == 2
    assert "there is no module nowhere.train" in capsys.readouterr().err
    options = argparse.Namespace(script=Module("a.b"), arguments=["1"])
    assert script.script_words(options) == ["-m", "a.b", "1"]
    with pytest.raises(ModuleNotFoundError, match=r"'fleetpipe\.nowhere'"):
        script.execute(Module("fleetpipe.nowhere"), [])


def test_logs_of_ranks_that_are_gone_are_removed(tmp_path: Path) -> None:
    for name in ("workerlog.0", "workerlog.1", "workerlog.10", "workerlog.old", "default.log"):
        (tmp_path / name).touch()
    script.remove_logs_beyond(tmp_path, 2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"workerlog.0", "workerlog.1", "workerlog.old", "default.log"}


SCRIPT = """
import sys
import fleetpipe
assert "paddle" not in sys.modules
fleetpipe.install()
fleetpipe.install()
import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import parallel_layers, PipelineLayer
from fleetpipe import fleet as ours
assert fleet is paddle.distributed.fleet is ours
assert PipelineLayer is parallel_layers.PipelineLayer is ours.meta_parallel.PipelineLayer
"""


def test_a_script_that_installs_first_finds_fleetpipe() -> None:
    done = command(sys.executable, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    # Nor does taking it back fail when Python ends.
    assert "Exception ignored" not in done.stderr


def test_too_late_is_said_and_changes_nothing() -> None:
    # This very module has imported Paddle's, and others of these tests may have.
    with pytest.raises(ConfigError, match=r"came too late\n.*has imported paddle.distributed.fl"):
        fleetpipe.install()
    assert sys.modules["paddle.distributed.fleet"] is theirs


STOCK = """
import paddle
{imports}
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {{"pp_degree": 2}}
fleet.init(is_collective=True, strategy=strategy)
layers = [LayerDesc(paddle.nn.Linear, 4, 4)] * 2
PipelineLayer(layers, topology=fleet.get_hybrid_communicate_group().topology())
"""


def test_warnings_may_be_errors() -> None:
    imports = "from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer"
    script = "from fleetpipe import fleet\n" + STOCK.format(imports=imports)
    done = command(sys.executable, "-W", "error", "-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(paddle.__version__ < "3", reason="fleet.init of 2.6.2 fails by itself")
@pytest.mark.parametrize(
    ("ranks", "told"), [(None, "from fleetpipe import fleet, for"), (2, "that of paddle.distrib")]
)
def test_a_stock_init_with_a_pipeline_layer_of_fleetpipes_is_named(
    launch: Launch, ranks: int | None, told: str
) -> None:
    imports = [
        "from paddle.distributed import fleet",
        "from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer",
    ]
    done = launch(STOCK.format(imports="\n".join(imports)), ranks, check=False)
    assert done.returncode == 1
    assert told in done.logs[0]


@pytest.mark.skipif(
    paddle.device.is_compiled_with_cuda(), reason="the package for GPUs builds Paddle's own"
)
@pytest.mark.parametrize("order", [1, -1], ids=["fleetpipe first", "Paddle first"])
def test_a_stock_pipeline_layer_is_named(launch: Launch, order: int) -> None:
    imports = [
        "from fleetpipe import fleet",
        "from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer",
    ]
    done = launch(STOCK.format(imports="\n".join(imports[::order])), None, check=False)
    assert done.returncode == 1
    told = "has no attribute '_device_id'.*\nfleetpipe: the PipelineLayer of this script is stock"
    assert re.search(told, done.logs[0])


PAGE = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
#: Names that a library needs, and what has them.
ROWS = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `(\w+)` \| Paddle\w+ [^|]+ \|", PAGE, re.MULTILINE)


def test_each_name_that_a_library_needs_is_fleetpipes() -> None:
    assert sum(len(names.split(", ")) for names, _ in ROWS) == 23
    with job(2):
        model: Any = pipeline()
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        optimizer = fleet.distributed_optimizer(
            paddle.optimizer.SGD(parameters=model.parameters(), grad_clip=clip)
        )
        here = (model, model.layers, optimizer, optimizer._inner_opt._grad_clip)
        owners = {type(one).__name__: one for one in here}
        owners["meta_parallel"] = fleet.meta_parallel
        for names, owner in ROWS:
            for name in re.findall(r"\w+", names):
                assert hasattr(owners[owner], name), name

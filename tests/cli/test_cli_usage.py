"""What the command line says of itself, of wrong words, and of what it cannot do or lacks."""

from __future__ import annotations

import argparse
import configparser
import logging
import os
import re
import shlex
import sys
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

import fleetpipe
from fleetpipe import cli, extras
from fleetpipe.cli import COMMANDS, main
from fleetpipe.errors import ConfigError, PackageNotFound
from fleetpipe.extras import needed_for
from fleetpipe.launch.streams import environment, quiet
from tests.fixtures import Capture, Patch
from tests.ground.test_without_paddle import without_paddle
from tests.launching import ROOT

SMALL = ("1F1B", "--ranks", "2", "--micro-batches", "2")


def test_the_version_is_told(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fleetpipe {fleetpipe.__version__}\n"


def test_help_is_a_command_too(capsys: Capture) -> None:
    for words, same in ((["help"], ["--help"]), (["help", "plan"], ["plan", "--help"])):
        assert main(words) == main(same) == 0
        first, second = capsys.readouterr().out.split("usage:")[1:]
        assert first == second


def test_completions_know_commands_and_their_options(capsys: Capture) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", "bash"]) == 0
    text = capsys.readouterr().out
    for word in ("launch", "checkpoint", "--micro-batches", "--memory-cap", "--keep-state"):
        assert word in text


def test_the_commands_that_start_ranks_spell_options_alike() -> None:
    known = []
    for name in ("run", "launch", "parity", "profile"):
        parser = argparse.ArgumentParser()
        cli._import_function(next(c.configure for c in COMMANDS if c.name == name))(parser)
        known.append(set(parser._option_string_actions))
    alike = {"--nproc", "--nproc_per_node", "--nproc-per-node"}
    alike |= {"--log-dir", "--log_dir", "--log-level", "--log_level"}
    assert all(alike <= options for options in known)


def test_a_package_brings_a_command(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for name in ("hello", "run"):
        metadata = tmp_path / f"{name}-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
        entry = f"[fleetpipe.commands]\n{name} = brought_command\n"
        (metadata / "entry_points.txt").write_text(entry)
    block = (ROOT / "docs" / "extending.md").read_text().rpartition("```python\n")[2]
    (tmp_path / "brought_command.py").write_text(block.partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["hello", "you", "--times", "2"]) == 0
    assert capsys.readouterr().out == "hello you\n" * 2
    assert main(["hello", "you", "--time"]) == main(["hallo"]) == 2
    assert "did you mean 'hello'" in capsys.readouterr().err
    assert main(["run", "you"]) == 2  # the table's own stays


def test_no_word_at_all_is_answered_with_every_command(capsys: Capture) -> None:
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert [command.name for command in COMMANDS if command.name not in output.err] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_argument_has_a_help_text(command: cli.Command) -> None:
    parser = argparse.ArgumentParser()
    cli._import_function(command.configure)(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["shedule", "1F1B"], "did you mean 'schedule'?"),
        (["Verify", "file"], "did you mean 'verify'"),
        (["schedule", "1f2b", *SMALL[1:]], "did you mean '1F1B'"),
        (["schedule", "INTERLEAVED", *SMALL[1:]], "did you mean 'Interleaved1F1B'"),
        (["xyz"], "known: checkpoint, doctor, estimate, hash, launch, locate, new, parity"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(
    words: list[str], hint: str, capsys: Capture
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert hint in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("run --nprc 2 {}", "there is no option --nprc: did you mean '--nproc'"),
        ("run --nproc 1 --log_dirs=a {}", "no option --log_dirs: did you mean '--log_dir'"),
        ("parity --reprot a.json {}", "no option --reprot: did you mean '--report'"),
        (f"schedule {' '.join(SMALL)} --micro-batchs 3", "did you mean '--micro-batches'"),
        ("schedule 1F1B --rnks=2", "no option --rnks: did you mean '--ranks'"),
        ("--verison", "no option --verison: did you mean '--version'"),
        ("estimate --memory-cap 1GB file", "no option --memory-cap: known: --batch"),
        ("verify --xyz file", "known: --help, --micro-batches, --placement"),
    ],
)
def test_a_wrong_option_is_answered_with_the_nearest(
    words: str, hint: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "train.py").write_text("")
    assert main(words.format(tmp_path / "train.py").split()) == 2
    output = capsys.readouterr()
    assert hint in output.err
    assert output.out == ""


@pytest.mark.parametrize("option", ["--nproc", "--nproc=", "--nproc_per_node", "--nproc-per-node"])
def test_processes_are_counted_alike_in_every_spelling(option: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    count = [f"{option}2"] if option.endswith("=") else [option, "2"]
    words = ["launch", *count, str(tmp_path / "train.py")]
    assert cli._build_parser(words).parse_args(words).nproc_per_node == 2


def test_options_behind_a_script_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(sys.argv[1:] != ['--nprc', '2', '--', '--reprot'])\n")
    assert main(["run", "--nproc", "1", str(script), "--nprc", "2", "--", "--reprot"]) == 0
    words = ["--log-l", "ERROR", "--", str(script), "--nprc", "2", "--", "--reprot"]
    assert main(["run", *words]) == 0


@pytest.mark.parametrize("command", ["run", "parity"])
def test_a_missing_script_is_named_alone(command: str, capsys: Capture) -> None:
    assert main([command, "--nproc", "2"]) == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: SCRIPT\n")


def test_help_and_usage_errors_of_every_command_need_no_paddle(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = without_paddle(
        f"""
from fleetpipe.cli import main
train = {str(tmp_path / "train.py")!r}
for command in ("run", "parity"):
    assert main([command, "--help"]) == 0
    for words in ([], ["missing.py"], ["--nproc", "0", train], ["--nproc", "9999", train]):
        assert main([command, *words]) == 2, words
    assert main([command, "--log-level", "LOUD", train]) == 2
assert main(["parity", "--report", "/nowhere/report.json", train]) == 2
assert "paddle" not in sys.modules
assert main(["run", train]) == 2  # this one needs it
"""
    )
    assert done.returncode == 0, done.stderr
    assert "argument SCRIPT: there is no file missing.py; give a training script" in done.stderr
    assert "--nproc_per_node: invalid number of processes: '0'; give 1 to 1024" in done.stderr
    assert "argument --report: there is no folder /nowhere" in done.stderr
    assert "pip install paddlepaddle" in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("verify {}/none.txt", ["FILE: cannot use", "No such file", "give a schedule or plan"]),
        ("verify {}", ["FILE: cannot use", "Is a directory"]),
        ("verify {}/binary", ["FILE: cannot use", "no text in UTF-8"]),
        ("schedule --costs {}/none.json", ["--costs", "No such", "give a JSON file"]),
        ("schedule --costs {}/binary", ["--costs", "no text in UTF-8"]),
        ("schedule --plot {}/none/a.png", ["--plot: there is no folder"]),
        ("schedule --trace {}/none/a.json", ["--trace: there is no folder"]),
        ("schedule --trace {}", ["--trace: ", "is a folder"]),
        ("schedule --trace /proc/a.json", ["--trace: cannot use /proc/a.json"]),
    ],
)
def test_a_file_that_cannot_be_used_names_the_argument_and_what_to_give(
    words: str, named: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    words = words.replace("schedule", f"schedule {' '.join(SMALL)}")
    assert main(words.format(tmp_path).split()) == 2
    output = capsys.readouterr()
    assert all(part in output.err for part in named), output.err
    assert "Errno" not in output.err
    assert output.out == ""


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("option", "number"),
    [("--ranks", 10**9), ("--ranks", 1025), ("--micro-batches", 10**9), ("--chunks", 10**9)],
)
def test_what_would_be_computed_for_minutes_is_refused_with_the_limit(
    option: str, number: int, capsys: Capture
) -> None:
    words = ["VPP", "--ranks", "2", "--micro-batches", "2", option, str(number)]
    assert main(["schedule", *words]) == 2
    assert "at most 1024 ranks and 600000 forwards" in capsys.readouterr().err


def test_paddles_own_lines_are_shown_from_a_level_on(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.delenv("GLOG_minloglevel", raising=False)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    logger = logging.getLogger("paddle.distributed.fleet.utils.log_util")
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logger, "handlers", [handler])
    before, glog = dict(os.environ), "GLOG_minloglevel"
    with warnings.catch_warnings():
        for level in ("WARNING", "INFO"):
            with quiet(level):
                logger.setLevel("INFO")  # as fleet.init does
                logger.info("an info under %s", level)
                logger.warning("a warning under %s", level)
                assert os.environ.get(glog) == {"WARNING": "1"}.get(level)
            assert dict(os.environ) == before
    told = capsys.readouterr().err.splitlines()
    assert told == ["a warning under WARNING", "an info under INFO", "a warning under INFO"]
    assert environment("ERROR")["GLOG_minloglevel"] == "2"
    assert environment("ERROR")["PYTHONWARNINGS"] == "error,ignore:No ccache found"
    assert environment("INFO") == before
    monkeypatch.setenv("GLOG_minloglevel", "0")
    assert environment("ERROR")["GLOG_minloglevel"] == "0"


def test_what_starts_another_frameworks_program_has_a_command_here(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (.+) \| .*`fleetpipe ((?:run|launch) [^`]+train.py[^`]*)`.* \|$", page, re.MULTILINE
    )
    started = " ".join(there for there, _ in rows)
    for name in ("torchrun", "mpirun", "run_pipeline.sh", "rank_table_8pcs.json"):
        assert name in started
    for _, command in rows:
        assert cli._build_parser(command.split()).parse_args(command.split()).script == Path(
            "train.py"
        )


DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "ray": "ray[train]==2.60.*",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}


def without(monkeypatch: Patch, package: str) -> None:
    """Hides a package from imports and from those who look for it."""

    def hidden(name: str) -> ModuleSpec | None:
        return None if name == package else find_spec(name)

    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(extras, "find_spec", hidden)


def test_every_line_installs_the_package_it_stands_for() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for name, line in extras.INSTALLED_BY.items():
        *pip, what = shlex.split(line)
        assert pip == ["pip", "install"]
        if what.startswith("fleetpipe["):
            inside = config["options.extras_require"][what[len("fleetpipe[") : -1]].split()
            assert DISTRIBUTIONS.get(name, name) in inside


def test_an_import_of_what_is_missing_says_its_purpose_and_the_line() -> None:
    with pytest.raises(PackageNotFound, match="a page: yaml is") as caught, needed_for("a page"):
        raise ModuleNotFoundError("no", name="yaml.cyaml")
    assert isinstance(caught.value, (ConfigError, ImportError))
    assert "what to do: pip install 'fleetpipe[project]'" in str(caught.value)
    with pytest.raises(ModuleNotFoundError, match="elsewhere"), needed_for("nothing"):
        raise ModuleNotFoundError("elsewhere", name="another")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import yaml", ["yaml"]),
        ("import os, yaml.cyaml", ["yaml"]),
        ("from yaml import safe_load", ["yaml"]),
        ("import beside", ["yaml"]),
        (
            "from fleetpipe.extras import needed_for\nwith needed_for('x'):\n    import yaml",
            ["yaml"],
        ),
        # What may run otherwise, or be found elsewhere, is left to Python.
        ("try:\n    import yaml\nexcept ImportError:\n    yaml = None", []),
        ("def late():\n    import yaml", []),
        ("import sys\nsys.path.append('/libraries')\nimport yaml", []),
        ("import nowhere", []),
        ("import yaml (", []),
    ],
)
def test_what_a_script_cannot_do_without(
    script: str, found: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    without(monkeypatch, "yaml")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "beside.py").write_text("import train, yaml")
    assert extras.missing_packages(tmp_path / "train.py") == found
    (tmp_path / "yaml.py").touch()
    assert extras.missing_packages(tmp_path / "train.py") == []


@pytest.mark.parametrize("command", ["run", "launch", "parity", "profile"])
def test_a_script_without_its_data_is_refused_before_any_rank_starts(
    command: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    without(monkeypatch, "sklearn")
    (tmp_path / "train.py").write_text("from sklearn.datasets import load_digits")
    assert main([command, str(tmp_path / "train.py")]) == 2
    told = capsys.readouterr().err
    assert "train.py imports sklearn, which is not installed: pip install scikit-learn" in told


def test_the_examples_need_no_package_but_paddle_and_fleetpipe() -> None:
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert [name for path in examples for name in extras._optional_imports(path, {path})] == []

"""What hosts, tools and the page of the environment say agrees with the sources."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import ROOT
from tests.test_house import modules

pytestmark = pytest.mark.once

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(" ".join(re.findall(r"^([\w -]+):(?!=)", MAKEFILE, re.MULTILINE)).split())


def jobs() -> dict[str, Any]:
    """Returns the workflow's jobs by name."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    found: dict[str, Any] = workflow["jobs"]
    return found


def targets(job: dict[str, Any]) -> set[str]:
    """Returns which targets a job's matrix names."""
    matrix = job["strategy"]["matrix"]
    return {*matrix.get("target", ()), *(row["target"] for row in matrix.get("include", ()))}


def test_the_workflow_runs_targets_of_the_makefile_and_nothing_else() -> None:
    for name, job in jobs().items():
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert runs == ["make ${{ matrix.target }} PYTHON=python"], name
        assert targets(job), name
        assert targets(job) - TARGETS == set(), name
        assert job["timeout-minutes"] <= 60, name
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [action for action in used if not re.search(r"@v\d+\.\d+\.\d+$", action)] == []


def test_the_workflow_runs_all_that_ci_runs() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:tests|step make(?: -j\d -O)?) ([\w -]+)$", script, re.MULTILINE)
    # Each job of the workflow sets up its own environment.
    wanted = set(" ".join(commands).split()) - {"environments"}
    assert len(wanted) > 5
    assert wanted - set().union(*map(targets, jobs().values())) == set()


def test_the_workflow_runs_every_python_that_setup_cfg_names() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    named = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    systems, versions = (jobs()[name]["strategy"]["matrix"] for name in ("systems", "versions"))
    assert systems["python"] == named
    assert set(versions["python"]) <= set(named)
    assert {row["os"] for row in systems["include"]} == set(systems["os"])


def test_pre_commit_takes_the_tools_that_are_pinned() -> None:
    pins = (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8")
    pinned = {line.partition(";")[0] for line in pins.splitlines()}
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert [hook["id"] for hook in hooks if hook["language"] != "python"] == []
    assert [
        hook["id"] for hook in hooks if not pinned.issuperset(hook["additional_dependencies"])
    ] == []


PAGES = [*sorted(ROOT.glob("*.md")), ROOT / ".github/PULL_REQUEST_TEMPLATE.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_links_of_the_pages_beside_the_code_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"(?:`|^    )make ([a-z][\w-]*)", text, re.MULTILINE)
    assert set(commands) - TARGETS == set()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


VARIABLE = re.compile(
    r"\b(?:FLEETPIPE|PADDLE|FLAGS|OMP|MKL|GLOO|GLOG|MALLOC|GLIBC|SLURM|CUDA|NCCL|OMPI|PMI|MASTER)"
    r"_[A-Za-z0-9_]+\b"
)
#: ``os.environ["NAME"]``, ``os.environ.get("NAME", ..)``, ``"NAME" in os.environ``.
ACCESS = re.compile(r'(?:environ(?:\.\w+\(|\[)|getenv\()"(\w+)"|"(\w+)" (?:not )?in os\.environ')
#: Names in the sources that only look so.
OTHERS = {"FLEETPIPE_DEFAULTS", "MASTER_WEIGHTS", "PADDLE_TRAINER"}


def test_the_page_has_every_variable() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in modules().values()]
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    read = {name for text in sources for found in ACCESS.findall(text) for name in found if name}
    named = {name for text in sources for name in VARIABLE.findall(text)} | read
    named |= {name for text in tests for name in re.findall(r"\bFLEETPIPE_TEST_[A-Z]+\b", text)}
    shown = set(re.findall(r"`([A-Z]+_\w+|[A-Z]{9,})`", page))
    assert named - OTHERS <= shown
    assert {name for name in shown if not any(name in text for text in [*sources, *tests])} == set()

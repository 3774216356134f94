"""What the repository has beside the package agrees with the sources, and runs.

That is: tools, workflows and pages, manifests for Kubernetes, benchmarks, and the notebook.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paddle
import pytest
import yaml

from benchmarks import run
from benchmarks.figures import Figure
from fleetpipe.job.job import current_job
from tests.fixtures import Capture, Patch
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


FOLDER = ROOT / "examples" / "kubernetes"
PADDLE, RAY = "paddlejob.yaml", "rayjob.yaml"


def manifest(name: str = PADDLE) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def worker() -> Any:
    """The one kind of replicas, as the webhook wants it: its containers have images."""
    replicas = manifest()["spec"]["paddleReplicaSpecs"]
    assert list(replicas) == ["Worker"]
    return replicas["Worker"]


def test_the_operator_takes_it() -> None:
    pod = worker()["template"]["spec"]
    assert all(container["image"] for container in pod["containers"])
    (container,) = [one for one in pod["containers"] if one["name"] == "paddle"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def told(number: int, address: str) -> dict[str, str]:
    """What the operator and the manifest tell the container of a pod."""
    (container,) = worker()["template"]["spec"]["containers"]
    (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == "master"]
    name = manifest()["metadata"]["name"]
    # The first pod is told its own address, the others the name of its service.
    master = f"{name}-worker-0" if number else address
    own = {one["name"]: one.get("value", address) for one in container["env"]}
    return {
        **own,
        "PADDLE_JOB_ID": name,
        "PADDLE_NNODES": str(worker()["replicas"]),
        "PADDLE_MASTER": f"{master}:{port}",
    }


def test_the_launcher_understands_what_it_is_told(monkeypatch: Patch) -> None:
    from paddle.distributed.launch.context import Context

    (container,) = worker()["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "paddle.distributed.launch"]
    monkeypatch.setattr(sys, "argv", ["launch", *container["args"]])
    for number, master in ((0, "10.1.0.7:36543"), (1, "pipeline-worker-0:36543")):
        for name, value in told(number, "10.1.0.7").items():
            monkeypatch.setenv(name, value)
        found: Mapping[str, Any] = vars(Context(enable_plugin=False).args)
        assert found["master"] == master
        assert found["host"] == "10.1.0.7"
        assert (found["nnodes"], found["nproc_per_node"]) == ("2", 4)
        assert (found["job_id"], found["training_script"]) == ("pipeline", "/app/train.py")


def test_ray_has_a_place_for_every_rank_and_its_pods_are_alike() -> None:
    spec = manifest(RAY)["spec"]
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    words = spec["entrypoint"].split()
    options = dict(zip(words[2::2], words[3::2]))
    assert words[:2] == ["fleetpipe", "launch"]
    assert options["--ray"] == "auto"
    assert options["--nnodes"] == f"1:{workers['replicas']}"
    assert options["--nproc"] == workers["rayStartParams"]["num-cpus"]
    # No rank is on the head, whose loss is another one's than a rank's.
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    head, worker = (group["template"]["spec"] for group in (cluster["headGroupSpec"], workers))
    for pod in (head, worker):
        (container,) = pod["containers"]
        names = {mount["name"] for mount in container["volumeMounts"]}
        assert names == {volume["name"] for volume in pod["volumes"]}
    for shared in ("image", "env", "volumeMounts"):
        assert head["containers"][0][shared] == worker["containers"][0][shared]


@pytest.mark.parametrize("name", [PADDLE, RAY])
def test_the_page_shows_the_manifests(name: str) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f'```yaml\n--8<-- "{(FOLDER / name).relative_to(ROOT).as_posix()}"\n```' in page


GOOD = """
import sys
from pathlib import Path
from benchmarks.figures import Figure, report
report([Figure("a step", [3.0, 1.0, 2.0], "ms")], Path(sys.argv[-1]))
"""
SLOW = """
import subprocess, sys, time
code = "import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_the_limits_are_those_of_the_whole_run() -> None:
    assert sum(benchmark.limit for benchmark in run.FULL) <= 40 * 60
    assert sum(benchmark.limit for benchmark in run.SHORT) <= 5 * 60


def test_every_benchmark_with_a_parser_is_run() -> None:
    folders = ("", "checkpoints", "schedules")
    scripts = {
        path.stem for name in folders for path in (run.ROOT / "benchmarks" / name).glob("*.py")
    }
    # The last of these prints the table of a page.
    apart = {"__init__", "run", "figures", "compare_schedules"}
    assert {*scripts, "split_backward"} - apart == {one.name for one in run.FULL}
    assert {one.name for one in run.SHORT} <= {one.name for one in run.FULL}


def test_one_that_fails_or_hangs_is_a_row(tmp_path: Path, monkeypatch: Patch) -> None:
    scripts = {"good": GOOD, "bad": "raise SystemExit('no')", "slow": SLOW}
    (tmp_path / "benchmarks").mkdir()
    for name, text in scripts.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(run.ROOT))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    limits = {"good": 60, "bad": 60, "slow": 2}
    results = [run.run(run.Benchmark(n, "", limits[n]), tmp_path) for n in scripts]
    assert run.rows(results) == [
        ("good", "a step, ms", "2", "1 to 3"),
        ("bad", f"failed: {tmp_path}/bad.log", "", ""),
        ("slow", f"passed its limit of 2 s: {tmp_path}/slow.log", "", ""),
    ]
    child = int((tmp_path / "slow.log").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child), "a process of a benchmark outlives its limit"


def _runs(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_the_environment_is_named() -> None:
    environment = run.environment()
    assert environment["versions"]["numpy"]
    assert environment["processor"]
    assert environment["cores"] == os.cpu_count()


def test_a_figure_has_median_and_range() -> None:
    row = Figure("x", [4.0, 1.0, 2.0, 3.0], "s").summary()
    assert (row["median"], row["least"], row["most"], row["count"]) == (2.5, 1.0, 4.0, 4)


_spec = importlib.util.spec_from_file_location("notebook", ROOT / ".ci" / "notebook.py")
assert _spec is not None
assert _spec.loader is not None
NOTEBOOK = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(NOTEBOOK)
CELLS = json.loads(NOTEBOOK.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
#: A loss to four digits, and what stages cost: other processors, and versions of Paddle, differ.
OF_THIS_MACHINE = {"cell-12", "cell-16"}
#: A table with the name of a function, which is ``_tanh`` on 2.6.2.
OF_THIS_VERSION: set[str] = {"cell-6"} if paddle.__version__.startswith("2.") else set()
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_cells_run_in_their_order(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = list(NOTEBOOK.run(CODE, names))
    assert current_job() is None
    # 1F1B on p ranks: (p - 1) / (m + p - 1) of the time is lost.
    assert names["bubbles"] == pytest.approx({m: 1 / (m + 1) for m in (1, 2, 4, 8, 16, 32)})
    assert names["timeline"].peak_activations == (2, 1)
    assert len(names["losses"].values) == 150
    assert names["losses"].values == names["single_losses"]
    assert names["differences"] == [0.0] * 8
    assert names["accuracy"] > 0.95
    assert [len(names["measured"][kind]) for kind in ("forward", "input_grad")] == [2, 2]
    assert 0 < names["expected"].bubble_rate < 1
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    for cell, outputs in zip(CODE, shown):
        texts, kept = (
            ["".join(one["text"]) for one in each if "text" in one]
            for each in (outputs, cell["outputs"])
        )
        if cell["id"] not in OF_THIS_MACHINE | OF_THIS_VERSION:
            assert texts == kept, f"run .ci/notebook.py: {cell['id']} shows something else"
    text = json.dumps(shown)
    assert "losses equal to the last bit: True" in text
    assert "rank 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---" in text


def test_its_pictures_are_light() -> None:
    pictures = [
        "".join(output["data"]["image/svg+xml"])
        for cell in CODE
        for output in cell["outputs"]
        if "data" in output
    ]
    assert len(pictures) == 2
    for picture in pictures:
        assert ">rank 1</text>" in picture
        assert len(picture) < 40_000
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)

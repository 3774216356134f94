"""What a rank makes of the variables that ``srun`` gives to its tasks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe import log
from fleetpipe.contrib import slurm as slurm
from fleetpipe.errors import ConfigError
from tests.fixtures import LogCapture, Patch
from tests.launching import ROOT

pytestmark = pytest.mark.once

#: Task 3 of five on two nodes, as srun(1) tells it.
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "localhost,node[1-3]",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "localhost,node2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: Patch) -> Patch:
    """An environment without a job, which is put back after the test."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PADDLE_"))}
    monkeypatch.setattr(os, "environ", clean)
    log.once.cache_clear()
    return monkeypatch


def adopted(**changes: str | None) -> dict[str, str]:
    """Returns what is set for a task."""
    os.environ.update({**TASK, **{name: text for name, text in changes.items() if text}})
    for name in [name for name, text in changes.items() if text is None]:
        os.environ.pop(name, None)
    slurm.adopt()
    return {name: text for name, text in os.environ.items() if name.startswith("PADDLE_")}


@pytest.mark.parametrize("name", ["train.sbatch", "ray.sbatch"])
def test_the_page_shows_the_batch_scripts(name: str) -> None:
    assert (ROOT / "examples" / "slurm" / name).exists()
    page = (ROOT / "docs" / "slurm.md").read_text()
    assert f'```bash\n--8<-- "examples/slurm/{name}"\n```' in page


def test_the_script_for_ray_starts_a_cluster_and_on_its_head_the_job(tmp_path: Path) -> None:
    shown = 'echo "$@"; printenv RAY_AUTH_MODE; wc -c < "$RAY_AUTH_TOKEN_PATH"'
    for name, words in (("scontrol", "echo node07; echo node08"), ("srun", shown)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    told = {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_JOB_NUM_NODES": "2",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    script = ROOT / "examples" / "slurm" / "ray.sbatch"
    command = ["bash", script, "train.py", "--epochs", "3"]
    found = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, check=True)
    words, mode, token_bytes = found.stdout.decode().splitlines()
    cluster, job = words.split(" -- ")
    assert cluster == ("--label ray symmetric-run --address node07:6379 --min-nodes 2 --num-cpus 4")
    assert job == (
        "fleetpipe launch --ray node07:6379 --nnodes 1:2 --nproc 4 --checkpoint_dir checkpoints "
        "train.py --epochs 3"
    )
    assert (mode, token_bytes) == ("token", "64")
    assert {file.name for file in tmp_path.iterdir()} == {"scontrol", "srun"}


def test_a_task_is_a_rank(caplog: LogCapture) -> None:
    port = 12000 + (31 * 1234 + 2) % 8000
    first, second = f"localhost:{port}", f"node2:{port}"
    assert adopted() == {
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_TRAINERS_NUM": "5",
        "PADDLE_TRAINER_ENDPOINTS": ",".join([first, first, first, second, second]),
        "PADDLE_CURRENT_ENDPOINT": second,
        "PADDLE_GLOBAL_RANK": "3",
        "PADDLE_GLOBAL_SIZE": "5",
        "PADDLE_LOCAL_RANK": "0",
        "PADDLE_LOCAL_SIZE": "2",
        "PADDLE_RANK_IN_NODE": "0",
        "PADDLE_NNODES": "2",
    }
    assert caplog.messages == []


def test_rank_0_says_so(caplog: LogCapture) -> None:
    made = adopted(SLURM_PROCID="0", SLURM_NODEID="0")
    first = made["PADDLE_CURRENT_ENDPOINT"]
    said = f"Slurm's job 1234, step 2: 5 ranks on 2 node(s), rank 0 at {first}"
    assert caplog.messages == [said]


def test_one_node_is_reached_by_the_loopback() -> None:
    made = adopted(
        SLURM_STEP_NODELIST="no-such-host",
        SLURM_STEP_TASKS_PER_NODE="5",
        SLURM_NODEID="0",
        SLURM_STEP_RESV_PORTS="12345-12346",
    )
    assert made["PADDLE_TRAINER_ENDPOINTS"] == ",".join(["127.0.0.1:12345"] * 5)
    assert made["PADDLE_LOCAL_SIZE"] == "5"


def test_the_user_may_say_where_rank_0_is() -> None:
    made = adopted(SLURM_STEP_NODELIST="no-such-host,node2", PADDLE_MASTER="10.1.2.3:29500")
    assert made["PADDLE_TRAINER_ENDPOINTS"].split(",")[2:4] == ["10.1.2.3:29500", "node2:29500"]
    assert "PADDLE_MASTER" not in made


def test_tasks_that_are_dealt_out_in_turn() -> None:
    made = adopted(SLURM_DISTRIBUTION="cyclic:block", SLURM_PROCID="4", SLURM_NODEID="0")
    hosts = [one.partition(":")[0] for one in made["PADDLE_TRAINER_ENDPOINTS"].split(",")]
    assert hosts == ["localhost", "node2", "localhost", "node2", "localhost"]


@pytest.mark.parametrize(
    "change",
    [
        {"PADDLE_TRAINER_ID": "1"},
        {"PADDLE_TRAINERS_NUM": "2"},
        {"SLURM_JOB_ID": None},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_launcher_comes_first_and_one_task_is_none(change: dict[str, str | None]) -> None:
    given = {name: text for name, text in change.items() if text and name.startswith("PADDLE_")}
    assert adopted(**change) == given


def test_a_batch_script_without_srun_is_one_process(caplog: LogCapture) -> None:
    assert adopted(SLURM_STEP_ID=None, SLURM_STEP_NUM_TASKS=None) == {}
    said = "one process within Slurm job 1234; srun would start its 5 tasks"
    assert caplog.messages == [said]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": None}, "Slurm did not set SLURM_PROCID"),
        ({"SLURM_LOCALID": "first"}, "no readable SLURM_LOCALID"),
        ({"SLURM_PROCID": "5"}, "task 5 of 5; nodes localhost, node2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, r"with \[5\] tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "no readable list of tasks for each node"),
        ({"SLURM_STEP_NODELIST": "localhost,node[2"}, "no readable list of nodes"),
        ({"SLURM_STEP_NODELIST": "no-such-host,node2"}, "cannot be reached at no-such-host:"),
        ({"PADDLE_MASTER": "localhost"}, "rank 0 cannot be reached"),
        ({"SLURM_NODEID": "0"}, "task 3 is not on the node where it was looked for"),
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "2"}, "expected: SLURM_NODEID=0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adopted(**change)
    assert "PADDLE_TRAINER_ID" not in os.environ


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07],login", ["node01", "node02", "node03", "node07", "login"]),
        ("a[9-11]-ib", ["a9-ib", "a10-ib", "a11-ib"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("gpu-0.cluster,n[0099-0100]", ["gpu-0.cluster", "n0099", "n0100"]),
    ],
)
def test_lists_of_nodes(listed: str, names: list[str]) -> None:
    assert slurm.expand_nodes(listed) == names


@pytest.mark.parametrize("listed", ["", "a,", "a[1-2", "a[]", "a[1-]", "a b", "a[x]", "a]"])
def test_what_is_no_list_of_nodes(listed: str) -> None:
    with pytest.raises(ConfigError, match="no readable list of nodes"):
        slurm.expand_nodes(listed)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_repeated_counts(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert slurm.expand_counts(text) == [count for count, times in runs for _ in range(times)]


def test_a_task_computes_on_its_card_from_the_start(environment: Patch) -> None:
    chosen: list[str] = []
    environment.setattr(slurm, "device_kind", lambda: "gpu")
    environment.setattr(paddle.device.cuda, "device_count", lambda: 4)
    environment.setattr(paddle.device, "set_device", chosen.append)
    adopted(SLURM_PROCID="4", SLURM_LOCALID="1")
    assert chosen == ["gpu:1"]

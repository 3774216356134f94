"""``fleetpipe launch``: what starts again, what it says, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

from fleetpipe.cli import main
from fleetpipe.launch.supervisor.attempts import POISONED
from tests.fixtures import Capture, Launch
from tests.launch.supervisor.commands import launched

#: What each rank does in each attempt stands in the script's arguments.
SCRIPT = """
    import os, pathlib, signal, sys, time
    from fleetpipe import fleet
    from fleetpipe.job import attempt_files
    from fleetpipe.job.job import all_ranks

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    write_begun = attempt_files.page()
    if fleet.worker_index() == 0:
        attempt_files.tell_record(pathlib.Path(sys.argv[0]).with_name("record"))
    happens = dict(pair.split("=") for pair in sys.argv[1:])
    what = happens.get(f"{attempt_files.number()}.{fleet.worker_index()}")
    if what is not None:
        write_begun(int(what[1:]) + 1)
    all_ranks().all_gather(None)
    if what and what[0] == "p":
        # What Paddle's launcher was forked from.
        stat = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    if what and what[0] == "e":
        sys.exit()
    if what and what[0] == "k":
        os.kill(os.getpid(), signal.SIGKILL)
    if what and what[0] == "r":
        raise MemoryError(f"cannot allocate {what[1:]} GiB")
    time.sleep(60)
    """


def test_a_job_is_started_again_but_no_step_a_third_time(launcher: Launch, tmp_path: Path) -> None:
    happens = ["1.1=k4", "2.0=r9", "3.1=k9"]
    (tmp_path / "record").mkdir()
    told = launched(launcher, SCRIPT, "launch", arguments=happens, folder=tmp_path)
    first, second, third, *rest = told.said
    assert first.startswith(
        "fleetpipe: attempt 1 ended in step 4: rank 1 died (was ended by SIGKILL)"
    )
    assert second == "fleetpipe: attempt 2 begins: restart 1 of 3"
    assert third == (
        "fleetpipe: attempt 2 ended in step 9: rank 0 raised: MemoryError: cannot allocate 9 GiB"
    )
    # Rank 0 has shown its traceback itself.
    assert not any(line.startswith("    | ") for line in rest)
    assert rest[-4] == "fleetpipe: attempt 3 begins: restart 2 of 3"
    assert "attempt 3 ended in step 9: rank 1 died" in rest[-3]
    assert rest[-2:] == [
        "fleetpipe: step 9 failed twice in a row: it is not started again",
        "  what to do: look at the data of this step and at the error above; a job that is started "
        "anew goes on from its checkpoint",
    ]
    assert told.code == POISONED
    lines = (tmp_path / "record" / "lives.jsonl").read_text().splitlines()
    ends = [json.loads(line) for line in lines]
    assert [(end["life"], end["step"], end["saved"]) for end in ends] == [
        *((1, 4, None), (2, 9, None), (3, 9, None))
    ]
    assert all(end["code"] for end in ends)
    assert ends[0]["culprit"].startswith("rank 1 died (was ended by SIGKILL)")
    assert "MemoryError: cannot allocate 9 GiB" in ends[1]["details"]


def test_without_the_process_that_starts_the_ranks_they_are_started_by_another(
    launcher: Launch, tmp_path: Path
) -> None:
    happens = ["1.0=p4", "2.0=e5", "2.1=e5"]
    (tmp_path / "record").mkdir()
    told = launched(launcher, SCRIPT, "launch", arguments=happens, folder=tmp_path)
    assert told.said == [
        "fleetpipe: attempt 1 ended: Paddle's launcher ended with 137",
        "fleetpipe: attempt 2 begins: restart 1 of 3",
    ]
    assert told.code == 0


def test_an_error_that_no_restart_mends_is_not_tried_again(
    launcher: Launch, tmp_path: Path
) -> None:
    told = launched(launcher, "import nowhere_to_be_found", "launch", folder=tmp_path)
    assert (told.code, told.said[-1]) == (
        1,
        "fleetpipe: no restart mends this error: the job has failed",
    )
    assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in told.said[0]


def test_wrong_numbers_are_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    wrong = "--nproc_per_node=0", "--max_restart=-1", "--grace=soon", "--grace=-1"
    for option in wrong:
        assert main(["launch", option, str(script)]) == 2
    for nodes in ("0", "2:1", "2:", "many"):
        assert main(["launch", f"--nnodes={nodes}", str(script)]) == 2
    assert main(["launch", str(tmp_path / "missing.py")]) == 2


def test_several_hosts_are_refused_with_what_to_use(tmp_path: Path, capsys: Capture) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    went = "--master=10.0.0.1:80", "--host=10.0.0.1", "--elastic_timeout=9", "--neighbour-every=3"
    for option in (*went, "--nnodes=2", "--nnodes=1:4"):
        assert main(["launch", option, str(script)]) == 2
        assert "give --ray ADDRESS" in capsys.readouterr().err

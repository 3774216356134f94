"""``fleetpipe launch --heal``: a rank that dies is replaced, and no bit is another one."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleetpipe.contrib.healing import replacement, survivor
from fleetpipe.contrib.healing.replacing import Healer
from fleetpipe.contrib.healing.survivor import Healing, ReplayableIterator
from fleetpipe.contrib.kept_state import kept_state
from fleetpipe.errors import FleetPipeError, PeerFailed, StateError
from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import Failure, Generation
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.axes import Degrees, Mesh
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.paddle_api.launcher import RankProcess
from fleetpipe.static import full_state_dict
from fleetpipe.transport import MemoryHub
from tests.contrib.healing import program_worker
from tests.fixtures import Launch, Patch
from tests.launch.supervisor.commands import launched
from tests.pipelines import begun
from tests.static.networks import executor_of, mlp, static_mode, strategy_of

WORKER = Path(__file__).with_name("healing_worker.py")
DEATHS = (
    *("1.2=forward", "0.4=update", "1.6=after"),
    *("0.8=kept", "1.9=kept", "0.10=before", "0.11=update", "1.11=update"),
)


def steps(log: str, word: str = "step") -> list[str]:
    """What a rank wrote of its steps, those that it did once more once."""
    return list(dict.fromkeys(re.findall(f"^{word} .*", log, re.MULTILINE)))


def tensors(folder: Path) -> dict[int, Any]:
    """The digests of all tensors of each step that is saved in a folder."""
    texts = [file.read_text() for file in folder.glob("step-*/manifest.json")]
    return {saved["step"]: saved["tensors"] for saved in map(json.loads, texts)}


def healed(
    launcher: Launch, folder: Path, worker: Path, words: Sequence[str], **env: str
) -> list[str]:
    """Runs a worker on two ranks, of which those of the words die; returns their logs."""
    options = ["launch", "--heal", "--max-restart", "9", "--checkpoint_dir", "shared"]
    job = launched(launcher, worker, *options, arguments=words, folder=folder, env=env)
    logs = logs_in(folder)
    assert (job.code, [line for line in job.said if "attempt" in line]) == (0, []), (job, logs)
    deaths = {f"died.{word}" for word in words if "=" in word}
    assert {file.name for file in folder.glob("died.*")} == deaths
    return logs


def logs_in(folder: Path) -> list[str]:
    """What both ranks wrote."""
    return [(folder / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "transport",
    [
        "sockets",
        pytest.param(
            "process_group",
            marks=pytest.mark.skipif(
                paddle.version.major == "2", reason="2.6.2 has no such transport on CPUs"
            ),
        ),
    ],
)
def test_ranks_that_die_are_replaced(
    launcher: Launch, launch: Launch, tmp_path: Path, transport: str
) -> None:
    alone = launch(WORKER, None, args=["13"]).logs[0]
    words = ["13", *DEATHS]
    logs = healed(launcher, tmp_path, WORKER, words, FLEETPIPE_TRANSPORT=transport)
    for log in logs:
        assert steps(log) == steps(alone)
        assert alone.splitlines()[-1] in log
    # The two that died in step 11 may have replaced each other.
    assert "".join(logs).count("another process has its place") in (6, 7, 8)


@pytest.mark.processes
def test_ranks_that_have_healed_stop_at_the_same_step(launcher: Launch, tmp_path: Path) -> None:
    options = ["--heal", "--checkpoint_dir", "shared"]
    arguments = ["20", "1.2=after", "ASK=5"]
    job = launched(launcher, WORKER, "launch", *options, arguments=arguments, folder=tmp_path)
    assert job.code == attempt_files.PREEMPTED, job
    assert "asked to stop, the job saved 7 steps" in job.said[-1]
    for log in logs_in(tmp_path):
        assert [step.split()[1] for step in steps(log)] == list("0123456")


@pytest.mark.processes
def test_a_rank_that_is_stopped_is_replaced(launcher: Launch, tmp_path: Path) -> None:
    logs = healed(launcher, tmp_path, WORKER, ["5", "1.3=stop"])
    assert "rank 1 was silent, another process has its place" in logs[0]
    assert steps(logs[0]) == steps(logs[1])
    assert len(steps(logs[0])) == 5


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "deaths"),
    [
        ([], ["1.1=evaluation", "0.2=saved", "0.3=evaluation", "1.4=saved"]),
        (["FIT"], ["1.1=evaluation", "0.4=forward", "1.8=saved"]),
    ],
)
def test_evaluations_and_saves_in_which_ranks_die_are_those_of_an_undisturbed_run(
    launcher: Launch, launch: Launch, tmp_path: Path, words: list[str], deaths: list[str]
) -> None:
    own = {"FLEETPIPE_CHECKPOINT_DIR": str(tmp_path / "alone")}
    alone = launch(WORKER, None, args=["4", *words], env=own).logs[0]
    for log in healed(launcher, tmp_path, WORKER, ["4", *words, *deaths]):
        assert steps(log, "eval") == steps(alone, "eval")
        assert alone.splitlines()[-1] in log
    saved = tensors(tmp_path / "shared")
    assert saved == tensors(tmp_path / "alone")
    assert len(saved) == 4


@pytest.mark.processes
def test_what_cannot_heal_is_started_again(
    launcher: Launch, launch: Launch, tmp_path: Path
) -> None:
    alone = launch(WORKER, None, args=["4"]).logs[0]
    arguments = ["4", "EVALUATE", "1.2=forward"]
    options = ["--heal", "--checkpoint_dir", "shared"]
    job = launched(launcher, WORKER, "launch", *options, arguments=arguments, folder=tmp_path)
    assert job.code == 0, job
    assert any(line.startswith("fleetpipe: the job does not heal: ") for line in job.said), job
    assert "fleetpipe: attempt 2 begins: restart 1 of 3" in job.said
    log = logs_in(tmp_path)[1]
    assert steps(log) == steps(alone)
    assert alone.splitlines()[-1] in log


class Ended:
    """A process that has ended."""

    pid = 2**22 + 1

    def __init__(self, code: int) -> None:
        self.poll = lambda: code


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder of an attempt of two ranks, both of which have kept a step."""
    for rank in (0, 1):
        attempt_files.note_start(tmp_path, rank, Ended.pid)
        (tmp_path / f"rank-{rank}.1").touch()
    monkeypatch.setenv(kept_state.FOLDER, str(tmp_path))
    monkeypatch.setenv(attempt_files.FOLDER, str(tmp_path))
    return tmp_path


def forget(home: Path) -> None:
    (home / "rank-0.1").unlink()


def stop(home: Path) -> None:
    (home / "preempted.0").write_text("3")


def refuse(home: Path) -> None:
    (home / "unhealed.0").write_text("ranks are at other steps")


def raise_for_good(home: Path) -> None:
    attempt_files.tell_failure(Failure(1, "raised", "ConfigError", permanent=True))


def wait_in_vain(home: Path) -> None:
    attempt_files.tell_failure(Failure(1, "timed out", "rank 1 waited"))


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (attempt_files.refuse_healing, "the job is ended"),
        (forget, "not every rank has kept a step, as a script does that goes by fleetpipe.resume"),
        (stop, "the job was asked to stop"),
        (refuse, "ranks are at other steps"),
        (raise_for_good, "no other process would do better"),
        (wait_in_vain, "no rank died: a wait has ended"),
        (lambda home: None, "as many processes were replaced as --max-restart allows"),
    ],
)
def test_why_no_process_is_replaced(home: Path, capsys: Any, happens: Any, why: str) -> None:
    happens(home)
    healer = Healer(home, most_replaced=0)
    held = healer.watch(RankProcess(1, Ended(-9), (), {}, None))
    assert held.poll() == -9
    assert attempt_files.current_generation().refused == why
    assert capsys.readouterr().err == f"fleetpipe: the job does not heal: {why}\n"
    assert attempt_files.ended_ranks(home) == [(1, -9)]


def test_a_rank_that_has_ended_is_met_by_no_other_process(home: Path, capsys: Any) -> None:
    healer = Healer(home, most_replaced=1)
    healer.watch(RankProcess(0, Ended(0), (), {}, None))
    held = healer.watch(RankProcess(1, Ended(-9), (), {}, None))
    assert held.poll() == -9
    why = "rank 0 has ended its work, and meets no other process"
    assert capsys.readouterr().err == f"fleetpipe: the job does not heal: {why}\n"
    later = Healer(home, most_replaced=1)
    held = later.watch(RankProcess(0, Ended(0), (), {}, None))
    later._generation = Generation(1, {1: 1})
    assert held.poll() == 0
    assert attempt_files.current_generation().refused == why


def test_a_rank_that_has_ended_in_the_midst_of_the_job_is_awaited_by_nobody(home: Path) -> None:
    held = Healer(home, most_replaced=1).watch(RankProcess(1, Ended(0), (), {}, None))
    assert held.poll() == held.wait(1) == 0
    assert attempt_files.current_generation() == Generation()
    # os._exit(0) is no goodbye, and what the others have noticed is a death.
    attempt_files.tell_failure(Failure(1, "died", "it ended without a goodbye"))
    held.poll()
    assert (
        attempt_files.current_generation().refused
        == "rank 1 has ended its work, and meets no other process"
    )


def test_a_generation_has_the_places_of_those_who_wait_for_it(home: Path) -> None:
    attempt_files.write_generation(home, Generation(2, {1: 2}))
    assert attempt_files.current_generation() == Generation(2, {1: 2})
    attempt_files.note_place(home, 0, 2, 7)
    attempt_files.note_place(home, 1, 1, 6)
    assert attempt_files.waiting_places(home, 2) == {0: 7}


def test_processes_that_replace_ranks_await_earlier_ones(home: Path, monkeypatch: Patch) -> None:
    attempt_files.write_generation(home, Generation(3, {0: 3, 1: 1, 2: 2}))
    job: Any = SimpleNamespace(degrees=Degrees(pp=3), timeout=0.0)
    kept: Any = SimpleNamespace(newest_of_all=lambda: None)
    for began, rank, outcome in (
        (1, 1, "ranks are at other steps"),
        (2, 2, r"ranks \[1\] did not"),
    ):
        monkeypatch.setenv(attempt_files.BEGAN, str(began))
        monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))
        with pytest.raises(FleetPipeError, match=outcome):
            replacement.restore(kept, job, home)


class Model:
    """A model without a loss layer."""


def healing_of(job: Any, run: Any, home: Path, model: Any) -> Any:
    """The healing of a job whose rank 1 has died, with a store of states that lacks nothing."""
    kept: Any = SimpleNamespace(obstacle=str)
    job._watch = SimpleNamespace(failure=Failure(1, "died", "it ended"), silent=list)
    return Healing(job, run, kept, home, model, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({}, ""),
        ({"model": object()}, "another model trains than the one that is kept"),
        ({"guards": 5}, "guards compare the ranks every few batches"),
        ({"drawn": True}, "a batch comes from a function"),
    ],
)
def test_a_batch_that_cannot_be_repeated_is_not(
    home: Path, batch: dict[str, Any], why: str
) -> None:
    job, model = Job(Degrees(), None, 1.0), Model()
    healing = healing_of(job, SimpleNamespace(step=3), home, model)
    healing.follow(**{"model": model, "scaler": None, "guards": 0, "drawn": False, **batch})
    job.healing = healing
    if why:
        with pytest.raises(PeerFailed, match="rank 1 died"):
            healing.heal(PeerFailed("rank 1 died"))
        assert (home / "unhealed.0").read_text() == why
    healing_of(job, SimpleNamespace(step=3), home, model)
    assert (home / "unhealed.0").read_text() == "the script has begun a second training"


@pytest.mark.parametrize(("step", "heals"), [(2, True), (3, False), (4, False)])
def test_a_step_that_cannot_be_repeated(
    home: Path, monkeypatch: Patch, step: int, heals: bool
) -> None:
    run = SimpleNamespace(step=step)
    healing = healing_of(Job(Degrees(), None, 1.0), run, home, Model())
    healing.forbid_healing("before the steps")
    healing.counts = True
    healing.forbid_healing("outputs of some ranks")
    monkeypatch.setattr(healing, "_await_generation", lambda: None)
    monkeypatch.setattr(healing, "meet", lambda: (Generation(1, {1: 1}), 3))
    run.step = 3
    if heals:
        assert healing.heal(PeerFailed("rank 1 died")) is False
        return
    with pytest.raises(PeerFailed, match="rank 1 died"):
        healing.heal(PeerFailed("rank 1 died"))
    assert (home / "unhealed.0").read_text() == "outputs of some ranks"


def test_groups_that_cannot_be_made_anew_are_told_first(home: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("fleetpipe.contrib.healing.survivor.communicates_over_host", lambda: False)
    healing_of(Job(Degrees(), None, 1.0), SimpleNamespace(step=3), home, Model())
    held = Healer(home, most_replaced=1).watch(RankProcess(1, Ended(-9), (), {}, None))
    assert held.poll() == -9
    assert attempt_files.current_generation().refused == "the ranks' groups are not Gloo's"


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ({0: {6: [1]}, 1: {6: [1], 7: [2]}}, [2]),  # it had come to the step
        ({0: {6: [1], 7: [3]}, 1: {6: [1]}}, [3]),  # another had, and had the same before
        ({0: {6: [5], 7: [3]}, 1: {6: [1]}}, None),  # or another batch
        ({0: {5: [1], 7: [3]}, 1: {5: [1]}}, [3]),  # steps may count several batches
        ({0: {6: [1, 2], 7: [3, 4]}, 1: {6: [None, 2]}}, [None, 4]),  # it had no inputs
        ({0: {6: [1, 2], 7: [3, 4]}, 1: {6: [5, 2]}}, None),
        ({0: {7: [3]}, 1: {6: [1]}}, None),
        ({0: {7: [3]}}, None),
    ],
)
def test_the_batch_of_a_rank_that_died_is_known_by_its_record(steps: Any, found: Any) -> None:
    now = {0: steps[0].get(7)}
    assert survivor.find_record(steps, now, 1, 7) == found


def test_a_record_stays_beside_the_next(home: Path) -> None:
    for step in (3, 4, 5):
        survivor.write_record(home, step, [step, None, 0])
    assert survivor.read_records(home) == {0: {4: [4, None, 0], 5: [5, None, 0]}}


@pytest.mark.parametrize("stuck", [True, False])
def test_a_rank_that_is_stuck_in_connecting_is_killed(monkeypatch: Patch, stuck: bool) -> None:
    killed = threading.Event()
    ended: list[tuple[int, ...]] = []
    monkeypatch.setattr(replacement, "_STUCK_SECONDS", 0.05)

    def kill(*whom: int) -> None:
        ended.append(whom)
        killed.set()

    monkeypatch.setattr(os, "kill", kill)
    watch: Any = SimpleNamespace(on_failure=lambda act: act())
    with replacement.killed_if_stuck(watch):
        killed.wait(5 * stuck)
    assert killed.wait(0.2) == stuck
    assert ended == [(os.getpid(), signal.SIGKILL)] * stuck


def test_variables_that_come_too_late_are_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(replacement, "ENVIRONMENT", {**os.environ, "OMP_NUM_THREADS": "7"})
    with pytest.raises(StateError, match="count when Paddle is loaded") as caught:
        replacement.begin_alone(Mesh(Degrees()), 1.0, 0, tuple, "sockets")  # type: ignore[arg-type]
    assert "OMP_NUM_THREADS" in str(caught.value)


def test_a_process_that_has_not_joined_meets_nobody(
    home: Path,
) -> None:
    job = Job(Degrees(), None, 1.0)
    job.require_others()
    job.begin_alone()
    with pytest.raises(
        StateError, match="cannot talk to other ranks before its first training batch"
    ):
        job.require_others()
    assert (home / "unhealed.0").read_text() == (
        "the script meets the other ranks before its first batch"
    )


def test_a_batch_is_taken_again_from_an_iterator_that_has_gone_on() -> None:
    def items() -> Iterator[int]:
        yield from range(5)

    taken = ReplayableIterator(items())
    assert [next(taken), next(taken)] == [0, 1]
    taken.begin_anew()
    assert [*taken] == [0, 1, 2, 3, 4]


def test_numbers_that_were_drawn_for_an_item_are_drawn_once_more() -> None:
    taken = ReplayableIterator(paddle.rand([1]) for _ in range(3))
    first, _ = next(taken), next(taken)
    behind = paddle.rand([1])
    paddle.seed(5)
    taken.begin_anew()
    assert next(taken) is first
    next(taken)
    assert paddle.rand([1]).item() == behind.item()


def test_a_member_that_is_alone_takes_its_own_values() -> None:
    group = DirectGroup(MemoryHub(2).endpoint(1), timeout=1)
    group.alone = True
    tensor = paddle.ones([2])
    group.all_reduce([tensor])
    group.broadcast_each([(tensor, 0)])
    assert group.all_gather(5) == [5, 5]
    assert group.broadcast("text", 0) == "text"
    assert [part.tolist() for part in group.all_to_all([tensor, 2 * tensor])] == [[2, 2], [2, 2]]
    assert tensor.tolist() == [1, 1]


PROGRAM_WORKER = Path(program_worker.__file__)
PROGRAM_DEATHS = (
    *("1.1=forward", "0.3=update", "0.4=before", "1.5=after"),
    *("0.6=kept", "1.7=kept", "1.8=before", "0.9=update", "1.9=update"),
)


def test_what_no_other_process_can_be_told_hinders_healing(monkeypatch: Patch) -> None:
    said: list[str] = []
    with static_mode(), begun(strategy_of()):
        executor_of(mlp(2)()[0], strategy_of())
        monkeypatch.setattr(current_job(), "healing", SimpleNamespace(forbid_healing=said.append))
        full_state_dict()
    assert said == ["the script gathers the state of all stages within its step"]


@pytest.mark.processes
def test_a_program_that_heals_has_the_same_bits(launcher: Launch, tmp_path: Path) -> None:
    alone: list[str] = []
    with static_mode():
        program_worker.train(11, str(tmp_path / "alone"), alone.append)
    logs = healed(launcher, tmp_path, PROGRAM_WORKER, ["11", *PROGRAM_DEATHS])
    for log in logs:
        assert steps(log) == [line for line in alone if line.startswith("step")]
    state = [line for log in logs for line in log.splitlines() if line.startswith("bits")]
    assert sorted(state) == sorted(line for line in alone if line.startswith("bits"))

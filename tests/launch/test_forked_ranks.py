"""How a command runs its ranks: as forks, with a folder that ends with them, with fewer of them."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fleetpipe import cli
from fleetpipe.launch import script as folders
from fleetpipe.launch.forked_ranks import START, ForkedProcess
from fleetpipe.launch.script import LAUNCHED, command_folder
from tests.fixtures import Capture, Launch, Patch
from tests.launch import facts as kit
from tests.launch.supervisor.commands import launched
from tests.launching import ROOT

FACTS = Path(kit.__file__)
#: The facts, by the way in which a job is begun, of which each is one job of two ranks.
Jobs = Mapping[str, Mapping[str, Any]]
#: A job has a umask, a limit and a nice value of its own, and no ear for SIGHUP.
SHELL = "umask 027; ulimit -n 500; trap '' HUP; exec nice -n 1 \"$@\""


@cache
def rows(script: Path) -> list[str]:
    """The names of all facts, which stand in the script as keys of dicts that it returns."""
    dicts = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Dict)]
    keys = [key.value for one in dicts for key in one.keys if isinstance(key, ast.Constant)]
    streams = [
        f"{mark}{name}{mark}" for mark in ("", "__") for name in ("stdin", "stdout", "stderr")
    ]
    pools = ("fork pool", "spawn pool")
    return sorted({*keys, *streams, *pools} - {*kit.NEW})


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The facts of each rank of a job of forks, and of one of new processes."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "train.py").write_text(FACTS.read_text())
    found: dict[str, dict[str, Any]] = {}
    for start in ("fork", "spawn"):
        told = folder / start
        told.mkdir()
        words = ["-m", "fleetpipe", "run", "--nproc", "2", "train.py", str(told)]
        ended = begin(words, folder, start, threads=2)
        assert ended.returncode == 0, ended.stdout
        found[start] = {file.stem: json.loads(file.read_text()) for file in told.iterdir()}
    return found


def begin(
    words: list[str], folder: Path, start: str, threads: int
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder to its end; ``threads`` are those of a product, 2 for as many."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), START: start}
    environment.pop("PYTHONBREAKPOINT", None)  # Ray sets it, in a process that began a cluster
    if threads > 1:
        del environment["OMP_NUM_THREADS"]
    return subprocess.run(
        ["sh", "-c", SHELL, "sh", sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
        cwd=folder,
        env=environment,
    )


@pytest.mark.processes
@pytest.mark.parametrize("row", rows(FACTS))
def test_a_fork_sees_what_a_new_process_does(jobs: Jobs, row: str) -> None:
    assert jobs["fork"].keys() == jobs["spawn"].keys() == {"0", "1"}
    for rank, seen in jobs["spawn"].items():
        assert jobs["fork"][rank][row] == seen[row]


@pytest.mark.processes
@pytest.mark.parametrize("row", kit.NEW)
def test_no_two_forks_have_the_same_random_numbers_and_names(jobs: Jobs, row: str) -> None:
    seen = [str(facts[row]) for job in jobs.values() for facts in job.values()]
    assert len(seen) == len(set(seen)) == 4


#: Ends of a script.
ENDS = {
    "falls off": "print('a')",
    "3": "sys.exit(3)",
    "None": "sys.exit()",
    "True": "sys.exit(True)",
    "text": "sys.exit('enough')",
    "at once": "print('seen', flush=True)\nopen('lost', 'w').write('x')\nos._exit(4)",
    "error": "def inner():\n    {}['key']\ninner()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
    "syntax": "x = = 1",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGUSR1": "os.kill(os.getpid(), signal.SIGUSR1)",
    "SIGTERM taken": "signal.signal(15, lambda *_: sys.exit(5))\nos.kill(os.getpid(), 15)\n"
    "import time\ntime.sleep(9)",
    "exit handlers": "import atexit\natexit.register(print, 'first')\n"
    "atexit.register(print, 'second')\nprint('end')",
    "error in one": "import atexit\natexit.register(os.kill, 0, 'x')",
    "finalizers": "import weakref\nclass A:\n    def __del__(self): print('del')\n"
    "a, b = A(), A()\nweakref.finalize(b, print, 'finalized')\nb.self = b",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), "
    "print('late'))).start()\nprint('end')",
    "error in thread": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "open file": "file = open(f'{sys.argv[0]}.open', 'w')\nfile.write('x' * 10)",
    "prints": "import ctypes\nprint('a', end='')\nsys.stdout.buffer.write(b'b')\n"
    "os.write(1, b'c')\nctypes.CDLL(None).puts(b'd')\nprint('e')\nsys.stderr.write('f')",
    "not encoded": "print('\\u00e9\\udc80')",
    "child": "import subprocess\nprint(subprocess.run(['sh', '-c', 'echo $PPID; exit 3'], "
    "stdout=-1).stdout == b'%d\\n' % os.getpid())",
    "fork": "if os.fork() == 0:\n    sys.exit(6)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "debugger": "breakpoint()\nprint()",
    "stdin": "print(repr(sys.stdin.read()), input())",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError as error:\n    print(error)",
    "closed": "sys.stdout.close()\nos.close(2)",
}
#: Ends where fleetpipe, or Paddle's C++, says another word than Python.
LAUNCHED_ENDS = {
    "SIGINT": "import time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "os.abort()",
}

#: Forks itself for each script of its arguments, one after another, and writes their exit codes.
FORK = """
import json, os, sys
from fleetpipe.launch import forked_ranks
from fleetpipe.launch.script import LAUNCHED

def launch():
    forked_ranks.load()
    codes = {}
    for file in sys.argv[1:]:
        words = [sys.executable, "-u", str(LAUNCHED), "run", file]
        program = forked_ranks.Program(words, dict(os.environ), file + ".log", file + ".log")
        codes[file] = forked_ranks.fork(program).wait(20)
    print(json.dumps(codes))

forked_ranks.run_launcher(launch)
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script for each end."""
    folder = tmp_path_factory.mktemp("ends")
    for name, code in {**ENDS, **LAUNCHED_ENDS}.items():
        (folder / f"{name}.py").write_text(f"import os, signal, sys\n{code}\n")
    return folder


@pytest.fixture(scope="module")
def ends(scripts: Path) -> Mapping[str, tuple[int, str]]:
    """How each script ends in a fork: with its exit code, and what it has printed."""
    names = [file.stem for file in scripts.glob("*.py")]
    done = begin(["-u", "-c", FORK, *(f"{name}.py" for name in names)], scripts, "fork", threads=1)
    assert done.returncode == 0, done.stdout
    codes = json.loads(done.stdout.splitlines()[-1])
    logs = {name: (scripts / f"{name}.py.log").read_text(errors="replace") for name in names}
    assert (scripts / "open file.py.open").read_text() == "x" * 10
    return {name: (codes[f"{name}.py"], logs[name]) for name in names}


@pytest.mark.once
@pytest.mark.processes
@pytest.mark.parametrize("name", ENDS)
def test_a_fork_ends_as_a_script(
    ends: Mapping[str, tuple[int, str]], name: str, scripts: Path
) -> None:
    alone = begin(["-u", f"{name}.py"], scripts, "fork", threads=1)
    assert ends[name] == (alone.returncode, alone.stdout)


@pytest.mark.processes
@pytest.mark.parametrize("name", LAUNCHED_ENDS)
def test_a_fork_ends_as_a_spawned_rank(
    ends: Mapping[str, tuple[int, str]], name: str, scripts: Path
) -> None:
    words = ["-u", "-W", "ignore", str(LAUNCHED), "run", f"{name}.py"]
    spawned = begin(words, scripts, "spawn", threads=1)
    code, log = ends[name]
    assert code == spawned.returncode
    said = [line for line in log.splitlines() if line.startswith(("fleetpipe", "FatalError"))]
    assert said == [line for line in spawned.stdout.splitlines() if line in said]
    assert len(said) == 1


def test_a_signal_that_comes_while_a_process_is_looked_at_is_sent_on() -> None:
    process = ForkedProcess(os.posix_spawn("/bin/sleep", ["sleep", "100"], {}))
    with process._lock:
        assert process.poll() is None
        process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    process._code = None  # as where another thread has seen the end since
    assert process._lock.acquire()
    process.kill()


def test_a_wait_for_a_fork_ends_at_its_limit() -> None:
    process = ForkedProcess(os.posix_spawn("/bin/sleep", ["sleep", "100"], {}))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()


@pytest.mark.parametrize("command", ["run", "profile"])
def test_what_launches_loads_no_paddle(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code = (
        "import sys\nfrom fleetpipe.cli import main\nfrom fleetpipe.launch import script\n"
        "script.launch = lambda *_: 'paddle' in sys.modules\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["-c", code, command, "--nproc", "2", "train.py"]
    assert begin(words, tmp_path, "fork", threads=1).returncode == 0


def hold(place: Path, told: Connection) -> None:
    folders._MEMORY = place
    with command_folder() as folder:
        told.send(folder)
        signal.pause()


def test_what_a_killed_command_left_is_removed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(folders, "_MEMORY", tmp_path)
    fork = multiprocessing.get_context("fork")
    told, tells = fork.Pipe(duplex=False)
    other = fork.Process(target=hold, args=(tmp_path, tells), daemon=True)
    other.start()
    theirs = told.recv()
    with command_folder() as own:
        assert own.stat().st_mode & 0o777 == 0o700
        assert {own, theirs} == set(tmp_path.iterdir())
    assert [*tmp_path.iterdir()] == [theirs]
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    with command_folder() as own:
        assert [*tmp_path.iterdir()] == [own]
    assert [*tmp_path.iterdir()] == []


#: A rank, with a process of its own in its session.
TRAIN = """
import os, pathlib, time
os.fork()
pathlib.Path("folder").write_text(os.environ.get("FLEETPIPE_COMMAND_FOLDER", "."))
pathlib.Path("rank." + os.environ["PADDLE_TRAINER_ID"]).touch()
time.sleep(100)
"""
#: Sends a signal to those processes of a command of which the words are.
KILL = """
    import os, pathlib, subprocess, sys, time
    from tests.launching import MARK, processes
    number, words, *command = sys.argv[1:]
    started = subprocess.Popen([sys.executable, "-m", "fleetpipe", *command])
    while len([*pathlib.Path().glob("rank.*")]) < 2:
        assert started.poll() is None
        time.sleep(0.05)
    for process, line in processes(os.environ[MARK]).items():
        if any(word in line for word in words.split(",")):
            os.kill(process, int(number))
    started.wait()
    """


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "number", "words"),
    [
        ("run", signal.SIGHUP, "-m fleetpipe"),
        ("locate", signal.SIGTERM, "-m fleetpipe"),
        ("launch", signal.SIGKILL, "-m fleetpipe"),
        # All but the ranks.
        ("launch", signal.SIGKILL, "-m fleetpipe,pod_server.py"),
    ],
)
def test_no_process_outlives_the_command_that_started_it(
    launch: Launch, tmp_path: Path, command: str, number: signal.Signals, words: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "temporary").mkdir()
    job = [command, "--nproc", "2", "train.py"]
    env = {"TMPDIR": str(tmp_path / "temporary")}
    # It raises an error if a process is left.
    ended = launch(KILL, None, args=[str(int(number)), words, *job], env=env, cwd=tmp_path)
    assert '  File "' not in ended.logs[0]
    assert [*(tmp_path / "temporary").iterdir()] == []
    left = Path((tmp_path / "folder").read_text())
    with command_folder():  # which removes what ranks that were left alone did not
        assert not left.exists()


WORKER = Path(__file__).with_name("fewer_worker.py")


@pytest.mark.once
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "pp"), [(3, 3), (4, 2)], ids=["stages", "replicas"])
def test_a_job_goes_on_with_fewer_ranks_and_with_all_again(
    launcher: Launch, launch: Launch, tmp_path: Path, ranks: int, pp: int
) -> None:
    file = tmp_path / "broken"
    alone = launch(WORKER, None, args=["10", str(pp), str(file)]).logs[0]
    file.touch()
    fewer = ["--nproc", str(ranks), "--least", "2", "--wider-after", "0.1", "--max-restart", "0"]
    arguments = ["10", str(pp), str(file)]
    told = launched(launcher, WORKER, "launch", *fewer, arguments=arguments, folder=tmp_path)
    assert told.code == 0, told.said
    given_up = [line for line in told.said if "is given up" in line]
    # A step is kept on all ranks or on none: the third may be lost with the rank.
    assert re.search(
        f"rank {ranks - 1} is given up, and tried again after 0.1 s: the job goes on after [23] "
        f"steps, from memory, with 2 ranks of {ranks}",
        given_up[0],
    )
    assert f"the job goes on with all {ranks} ranks again" in told.said[-1], told.said
    log = (tmp_path / "log" / "workerlog.0").read_text()
    did = re.findall(r"step (\d+) (\d+) (.*)", log)
    assert [*dict.fromkeys((step, loss) for step, _, loss in did)] == [
        (step, loss) for step, _, loss in re.findall(r"step (\d+) (\d+) (.*)", alone)
    ]
    with_ranks = [int(count) for *_, count in re.findall(r"step (\d+) (\d+)", log)]
    assert with_ranks[:2] == [ranks] * 2
    assert with_ranks[-1] == ranks
    assert {2, ranks} == {*with_ranks}
    assert alone.splitlines()[-1] in log


def test_a_job_that_may_not_have_fewer_ranks_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "train.py").touch()
    words = ["launch", "--nproc", "2", "--least", "2", str(tmp_path / "train.py")]
    assert cli.main(words) == 2
    assert "--least is a smaller number of ranks" in (told := capsys.readouterr().err)
    assert "what to do: --least 1" in told

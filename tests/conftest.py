"""What all tests share: one thread, seeds, versions in the header, stacks of a crash, jobs."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import HealthCheck, settings

from fleetpipe import numerics
from fleetpipe.schedules.families.table import FAMILIES
from tests import byhand, hidden_names, launching
from tests.launching import Finished

# More threads would change the bits of a product. Paddle reads this once, when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# MKL's products for AVX-512 have other bits where a matrix lies transposed, which tests of sums by
# hand, and of layers that are computed in less time, would take for errors.
if "GenuineIntel" in (cpu := numerics.cpu_description()) and " avx512f " in cpu:
    os.environ.setdefault("MKL_CBWR", "AVX2")

# A shell that starts tests in its background has them ignore Ctrl-C, and so would all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where a process that crashes leaves its stacks: the workers of xdist inherit the environment.
os.environ.setdefault("FLEETPIPE_TEST_CRASHES", tempfile.mkdtemp(prefix="crashes-"))
CRASHES = Path(os.environ["FLEETPIPE_TEST_CRASHES"])
#: How long the signal that ends a test may take to be taken.
SIGNAL_SECONDS = float(os.environ.get("FLEETPIPE_TEST_SIGNAL_SECONDS", "60"))

# Files whose tests measure how long processes take to end, or start Paddle's launcher: they run one
# after another on one worker of xdist, the first files of all. (A group of xdist's would do that,
# but a test's id cannot be changed any more since pytest 9.2.)
CLOCK = {
    "tests/launch/supervisor/test_supervisor.py",
    "tests/launch/test_resume.py",
    "tests/processes/failures/test_failures.py",
    "tests/processes/hosts/test_hosts.py",
    "tests/processes/examples/test_run.py",
    "tests/processes/hosts/test_start.py",
    "tests/contrib/ray/test_cluster.py",
    "tests/contrib/ray/test_launch.py",
    "tests/contrib/ray/test_trainer.py",
    "tests/contrib/starter/test_new.py",
    "tests/harness/test_launching.py",
}

# The machine's load must not decide whether a property holds.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_report_header() -> str:
    """Names the Paddle that is installed, without importing it."""
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}, {threads}"
    return "no Paddle"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rows",
        type=int,
        default=0,
        help="run so many rows of each test's table, the first, the last and some between (0: all)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives whole files to the workers, which share fixtures; and those of CLOCK to one of them."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "clock" if file in CLOCK else file

    return Scheduler(config, log)


def _is_once(item: pytest.Function) -> bool:
    """Whether a test, or one of the packages that it is in, is marked ``once`` or ``no_paddle``."""
    packages = accumulate(item.module.__name__.split(".")[:-1], "{}.{}".format)
    marks = [getattr(sys.modules[package], "pytestmark", None) for package in packages]
    names = {mark.name for mark in (*marks, *item.iter_markers()) if mark}
    rows = item.get_closest_marker("once_for")
    return bool(names & {"once", "no_paddle"}) or (
        rows is not None and item.callspec.id.startswith(rows.args)
    )


def rows_left_out(items: list[pytest.Item], most: int) -> set[pytest.Item]:
    """Returns all but ``most`` rows of each table, which are taken evenly.

    Those that are ``once`` are a table of their own, which another version of Paddle leaves out.
    """
    tables: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("every_row") is None:
            once = item.get_closest_marker("once") is not None
            tables.setdefault((item.nodeid.partition("[")[0], once), []).append(item)
    left_out: set[pytest.Item] = set()
    for rows in tables.values():
        if len(rows) > most:
            taken = {round(k * (len(rows) - 1) / max(most - 1, 1)) for k in range(most)}
            left_out.update(row for n, row in enumerate(rows) if n not in taken)
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests. What waits most comes first, what leaves least to do comes last."""
    for item in items:
        if {"launch", "launcher", "on_ranks"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)
        if isinstance(item, pytest.Function) and _is_once(item):
            item.add_marker(pytest.mark.once)
        if why := hidden_names.reason_to_skip(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=why))
    if rows := config.getoption("rows"):
        left_out = rows_left_out(items, rows)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(
        key=lambda item: (
            item.nodeid.partition("::")[0] not in CLOCK,
            item.get_closest_marker("processes") is not None,
        )
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows where the processes were that crashed."""
    for file in sorted(CRASHES.glob("*.txt")):
        if stacks := file.read_text(errors="replace"):
            terminalreporter.section(f"stacks of process {file.stem}")
            terminalreporter.write(stacks)


def pytest_sessionfinish() -> None:
    """Ends the workers of loaders that a test left: xdist leaves without Python's own farewell."""
    if sys.platform != "win32":
        # Paddle's own handler would raise an error wherever this process is by then.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the folder, once all workers have ended."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(CRASHES, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends a process, with its stacks, where the signal of a test's limit is not taken.

    The main thread takes none while it waits within Paddle's C++.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + SIGNAL_SECONDS, exit=True, file=_stacks())
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@cache
def _stacks() -> BinaryIO:
    """Returns where stacks go: for a worker of xdist a file, which the main process shows."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return (CRASHES / f"{os.getpid()}.txt").open("ab")
    return os.fdopen(os.dup(2), "wb")  # between tests, when pytest captures nothing


@cache
def _leave_stacks_on_a_crash(with_paddle: bool) -> None:
    if with_paddle:
        # Paddle takes these signals when it is imported, for a report of its own; and what is
        # written to standard error is lost with pytest's capture of it.
        sys.modules["paddle"].disable_signal_handler()
    faulthandler.disable()
    faulthandler.enable(_stacks(), all_threads=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Gives every test the same random numbers and notices, whatever ran before it."""
    logging.getLogger("fleetpipe").setLevel(logging.INFO)
    _leave_stacks_on_a_crash("paddle" in sys.modules)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if hasattr(sys.modules.get("paddle"), "seed"):
        sys.modules["paddle"].seed(0)


@pytest.fixture
def own_names() -> Iterator[None]:
    """Forgets at the end which schedules a test registered."""
    known = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(known)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Finished]:
    """Runs a script on several ranks: `tests.byhand.run` with the test's own folder for logs."""
    return partial(byhand.run, folder=tmp_path)


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Calls a function on each of several ranks: `tests.byhand.call`, with the test's folder."""
    return partial(byhand.call, folder=tmp_path)


@pytest.fixture
def launcher(tmp_path: Path) -> Callable[..., Finished]:
    """As `launch`, but as a user does it, from the launcher on: `tests.launching.run`."""
    return partial(launching.run, folder=tmp_path)

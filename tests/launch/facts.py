"""A script that writes what it sees of its process as JSON, one file for each rank.

Run it with the folder of the files as its only argument. A row is a fact, and equal however the
rank was started; `NEW` are those that have to differ in every process.
"""

from __future__ import annotations

import faulthandler
import json
import locale
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
import warnings
from pathlib import Path
from typing import Any

#: Rows that differ in every process, of one job and of another.
NEW = ("random", "numpy", "paddle", "uuid1", "uuid4", "temporary name", "urandom")
#: Variables that differ in every job, by their beginnings.
PER_JOB = (
    *("FLEETPIPE_COMMAND_FOLDER", "FLEETPIPE_LIFE", "FLEETPIPE_START"),
    *("PADDLE_BACKUP", "PADDLE_CURRENT", "PADDLE_MASTER", "PADDLE_TRAINER_E", "POD_NAME"),
)
#: What a fork has loaded that no script of its own process has.
LAUNCHERS = {"runpy", "socketserver", "stringprep"}


class Value:
    """A class of the script, which is pickled by the name of its module."""


class Squares:
    """A data set, of which workers of a loader make samples."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return square(index)


def square(number: int) -> int:
    """A function of the script, which other processes find."""
    return number * number


def main() -> None:
    """Writes the facts."""
    native = len(os.listdir("/proc/self/task"))  # before a worker may begin another
    names = [thread.name for thread in threading.enumerate()]
    faulthandler.dump_traceback_later(60, exit=True)
    facts = {**interpreter(), **process(), **streams(), **new(), **paddles(), **children()}
    facts.update({"threads": names, "native threads": native})
    file = f"{os.environ.get('PADDLE_TRAINER_ID', 'alone')}.json"
    (Path(sys.argv[1]) / file).write_text(json.dumps(facts))


def interpreter() -> dict[str, Any]:
    """What Python says of the program."""
    module = sys.modules["__main__"]
    spec = module.__spec__
    thread = threading.Thread()
    return {
        "argv": [Path(sys.argv[0]).name, len(sys.argv)],
        "orig_argv": sys.orig_argv[:-1],
        "flags": str(sys.flags),
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "spec": [module.__package__, spec and spec.name, vars(module).get("__cached__")],
        "names": sorted(name for name in vars(module) if name.startswith("__")),
        "own class": pickle.dumps(Value).decode("latin-1"),
        "unpickled": pickle.loads(pickle.dumps(Value)) is Value,
        # A script's own module of another name is the one that it gets.
        "modules": sorted({name.partition(".")[0] for name in sys.modules} - LAUNCHERS),
        "recursion": sys.getrecursionlimit(),
        "hooks": [repr(hook).partition(" at ")[0] for hook in (sys.excepthook, sys.displayhook)],
        "traced": [sys.gettrace() is None, sys.getprofile() is None],
        "error": [sys.exc_info()[0] is None, hasattr(sys, "last_value")],
        "warnings": [str(one) for one in warnings.filters],
        "logging": [len(logging.root.handlers), logging.root.level],
        "thread": thread.name,
        "main thread": threading.current_thread() is threading.main_thread(),
        "multiprocessing": [
            multiprocessing.current_process().name,
            multiprocessing.active_children(),
        ],
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()],
        "faulthandler": faulthandler.is_enabled(),
    }


def process() -> dict[str, Any]:
    """What the system says of the process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(PER_JOB)
    }
    shell = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    handlers = {
        one.name: repr(signal.getsignal(one)).partition(" at ")[0]
        for one in signal.valid_signals()
        if isinstance(one, signal.Signals)
    }
    return {
        "cwd": os.getcwd(),
        "umask": status["Umask"],
        "environment": environment,
        "inherited": sorted(
            set(shell.splitlines()) ^ {"=".join(row) for row in os.environ.items()}
        ),
        "handlers": handlers,
        "signals": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        # A subprocess gets what is open and inheritable.
        "inheritable": [n for n in range(3, 100) if _is_inheritable(n)],
    }


def streams() -> dict[str, Any]:
    """What the standard streams are."""
    facts = {}
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"):
        stream = getattr(sys, name)
        facts[name] = [
            *(type(stream).__name__, type(stream.buffer).__name__, stream.name, stream.fileno()),
            *(stream.encoding, stream.errors, stream.isatty()),
            *(stream.line_buffering, stream.write_through),
        ]
    return facts


def new() -> dict[str, Any]:
    """What no other process may have; and what each has that gives the same seed."""
    import numpy as np
    import paddle

    facts = {
        "random": random.random(),
        "numpy": float(np.random.rand()),
        "paddle": paddle.rand([2]).tolist(),
        "uuid1": str(uuid.uuid1()),
        "uuid4": str(uuid.uuid4()),
        "temporary name": Path(tempfile.mktemp()).name,
        "urandom": os.urandom(8).hex(),
    }
    random.seed(3)
    np.random.seed(3)
    paddle.seed(3)
    seeded = [random.random(), float(np.random.rand()), paddle.rand([2]).tolist()]
    return {**facts, "seeded": seeded}


def children() -> dict[str, Any]:
    """What processes of the script's give back: of pools, and of a loader."""
    from paddle.io import DataLoader

    facts: dict[str, Any] = {}
    for method in ("fork", "spawn"):
        pool = multiprocessing.get_context(method).Pool(1)
        facts[f"{method} pool"] = pool.map(square, [3])
        # A pool that is left by `with` ends its processes by SIGTERM, which Paddle's handler may
        # keep for ever.
        pool.close()
        pool.join()
    batches = DataLoader(Squares(), batch_size=2, num_workers=2)
    return {**facts, "batches": [batch[0].tolist() for batch in batches]}


def paddles() -> dict[str, Any]:
    """What Paddle does: a product and its threads, its place, Fleet."""
    import paddle
    from paddle.distributed import fleet

    paddle.seed(1)
    product = paddle.rand([256, 256]) @ paddle.rand([256, 256])
    return {
        "product": float(product.sum()),
        "threads of a product": len(os.listdir("/proc/self/task")),
        "place": str(paddle.framework._current_expected_place()),
        "fleet": fleet.__name__,
        "rank": paddle.distributed.get_rank(),
    }


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


if __name__ == "__main__":
    main()

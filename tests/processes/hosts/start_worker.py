"""One rank of a job that is stopped or killed while it begins: see test_start.py.

``start_worker.py MOMENT SIGNAL RANK`` sends the signal to its own process at that moment of
``fleet.init``, on that rank; ``start_worker.py cycles`` begins and ends jobs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from fleetpipe.job import job as jobs
from fleetpipe.job import meeting, start
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.paddle_api.distributed import _paddle_collective
from tests.pipelines import batch, job, pipeline, sgd

RANK = int(os.environ["PADDLE_TRAINER_ID"])
RANKS = int(os.environ["PADDLE_TRAINERS_NUM"])
TIMEOUT = float(os.environ.get("START_TIMEOUT", "60"))
#: Which function a rank enters at each moment.
MOMENTS: dict[str, tuple[Any, str]] = {
    "connecting": (start, "join"),
    "opening Paddle's store": (meeting, "paddles_client"),
    "within a group": (_paddle_collective, "_new_process_group_impl"),
    "within the first sum": (paddle.distributed, "all_reduce"),
    "ending": (DirectGroup, "broadcast"),
}


def trouble(number: int) -> None:
    """Notes the moment where the test finds it, and sends this process a signal."""
    time.sleep(0.5)  # until the others wait for this rank
    Path(f"troubled.{RANK}").write_text(f"{time.monotonic()}\n")
    os.kill(os.getpid(), number)


def at(moment: str, number: int) -> None:
    """Has the trouble happen at the first call of the function that stands for a moment."""
    owner, name = MOMENTS[moment]
    stock: Callable[..., Any] = getattr(owner, name)

    def troubled(*args: Any, **named: Any) -> Any:
        setattr(owner, name, stock)
        trouble(number)
        return stock(*args, **named)

    setattr(owner, name, troubled)


def open_things() -> str:
    """Counts this process's descriptors, threads, and objects that Python knows of."""
    gc.collect()
    threads, descriptors = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    # Each parameter that Paddle makes, of a plain model too, leaves an empty list behind.
    objects = sum(type(thing) is not list for thing in gc.get_objects())
    return f"{descriptors} descriptors, {threads} threads; {objects} objects"


def cycles() -> None:
    """Begins and ends ten jobs, and trains in each."""
    for cycle in range(1, 11):
        with job(RANKS, timeout=TIMEOUT):
            model = pipeline()
            loss = model.train_batch(batch(seed=1), sgd(model))
        del model
        time.sleep(0.1)  # until the threads that have ended are gone
        sys.stdout.write(f"### {cycle}: {open_things()}; {loss.numpy().tobytes().hex()}\n")


if __name__ == "__main__":
    if sys.argv[1] == "cycles":
        cycles()
    else:
        if int(sys.argv[3]) == RANK:
            at(sys.argv[1], getattr(signal, sys.argv[2]))
        with job(RANKS, timeout=TIMEOUT):
            if sys.argv[1] == "ending":
                # Half of it fits into no kernel's buffer; nobody receives it.
                jobs.all_ranks().broadcast(paddle.zeros([1 << 23]), 1 - int(sys.argv[3]))

"""One rank of a job in which something goes wrong: ``trouble.py CASE``; see test_failures.py.

A rank notes the moment of an event in a file of its working directory. Steps count from 0; the
trouble comes in step 2, so that the first ones show that training works.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.job.job import current_job
from tests import pipelines
from tests.byhand import kill_now
from tests.pipelines import CLASSES, FEATURES, batch, bits, pipeline, sgd

RANK = int(os.environ["PADDLE_TRAINER_ID"])
RANKS = int(os.environ["PADDLE_TRAINERS_NUM"])
TIMEOUT = float(os.environ.get("TROUBLE_TIMEOUT", "60"))
WIDTH = 8

Trouble = Callable[[], None]


def note(event: str) -> None:
    """Writes the moment of an event where the test finds it."""
    Path(f"{event}.{RANK}").write_text(f"{time.monotonic()}\n")


class Plan:
    """What happens in which step, and in which pass, of this rank's layer."""

    step = -1
    forward: Trouble | None = None
    backward: Trouble | None = None

    @classmethod
    def happen(cls, trouble: Trouble | None) -> None:
        if cls.step == 2 and trouble is not None:
            trouble()


class _Pass(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Plan.happen(Plan.forward)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        Plan.happen(Plan.backward)
        return grad * 1.0


class TroubledLinear(nn.Linear):
    """A linear layer in whose passes this rank's trouble happens."""

    def forward(self, x: Any) -> Any:
        return _Pass.apply(super().forward(x))


def layers(width: int = WIDTH) -> list[Any]:
    """One troubled layer for each rank."""
    sizes = [FEATURES] + [width] * (RANKS - 1) + [CLASSES]
    return [LayerDesc(TroubledLinear, *pair) for pair in itertools.pairwise(sizes)]


def train(model: Any, optimizer: Any, steps: int = 4, between: Trouble | None = None) -> list[str]:
    """Trains; returns the bits of the losses."""
    losses = []
    for Plan.step in range(steps):
        if Plan.step == 2 and between is not None:
            between()
        losses.append(model.train_batch(batch(seed=Plan.step), optimizer))
    return [loss.numpy().tobytes().hex() for loss in losses]


def begin(width: int = WIDTH, **changes: Any) -> tuple[Any, Any]:
    """Begins a job of all ranks as one pipeline; returns the model and the optimizer."""
    pipelines.begin(**{"pp": RANKS, "timeout": TIMEOUT, **changes})
    paddle.seed(1)
    model = pipeline(layers(width))
    return model, sgd(model)


def die() -> None:
    time.sleep(0.5)  # until the others do what they are to do meanwhile
    note("died")
    kill_now()


def stop() -> None:
    time.sleep(0.5)  # until the others have heard where this rank is
    note("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)


def long_product() -> None:
    note("computing")
    big = paddle.ones([8000, 8000])
    paddle.matmul(big, big).numpy()
    note("computed")


def deadlock() -> None:
    note("stopped")
    threading.Event().wait()


def boom() -> None:
    raise ValueError("boom in a layer")


def on_rank(rank: int, trouble: Trouble | None, otherwise: Trouble | None = None) -> Any:
    return trouble if rank == RANK else otherwise


# The cases: one function each.


def killed_while_one_computes() -> None:
    """Rank 1 dies; rank 0 is in one long product, the last one waits."""
    Plan.forward = on_rank(1, die)
    if RANK == 0:
        later(long_product)
    train(*begin())


def later(trouble: Trouble) -> None:
    """Lets micro-batch 0 through to the next rank; the trouble comes with micro-batch 1."""
    count = iter(range(100))
    Plan.forward = lambda: trouble() if next(count) == 1 else None


def killed_while_waiting() -> None:
    Plan.forward = on_rank(1, die)
    train(*begin())


def killed_inside_gloo() -> None:
    """The replicas have met; rank 0 waits inside Gloo for rank 1, which dies there."""
    inside_gloo(die)


def stopped_inside_gloo() -> None:
    inside_gloo(stop)


def inside_gloo(trouble: Trouble) -> None:
    model, optimizer = begin(dp=2, pp=1)
    if RANK == 1:
        real = paddle.distributed.all_reduce
        paddle.distributed.all_reduce = lambda *a, **k: (
            trouble() if Plan.step == 2 else real(*a, **k)
        )
    train(model, optimizer)


def stopped() -> None:
    Plan.forward = on_rank(1, stop)
    train(*begin())


def deadlocked() -> None:
    Plan.forward = on_rank(1, deadlock)
    train(*begin())


def stopped_and_continued() -> None:
    """Trains twice from the same start, the second time with a stop: all bits are the same."""
    model, optimizer = begin()
    start = {name: value.clone() for name, value in model.layers.state_dict().items()}
    undisturbed = train(model, optimizer), bits(model.layers.state_dict())
    model.layers.set_state_dict(start)
    Plan.backward = on_rank(1, once(stop))
    assert (train(model, optimizer), bits(model.layers.state_dict())) == undisturbed
    note("same")


def suspended() -> None:
    """Trains on, while the test stops all ranks at any moment."""
    model, optimizer = begin()
    everyone = current_job().everyone()
    note("begun")
    while not any(everyone.all_gather(Path("enough").exists())):
        model.train_batch(batch(), optimizer)


def once(trouble: Trouble) -> Trouble:
    def first_time() -> None:
        Plan.backward = None
        trouble()

    return first_time


def slow_replica() -> None:
    """Longer than Gloo's 30 s before a collective."""
    if RANK == 1:
        later(lambda: time.sleep(35))
    train(*begin(dp=2, pp=1))
    note("done")


def stopped_over_groups() -> None:
    """A rank that is stopped before another sends to it over one of Paddle's groups."""
    Plan.forward = on_rank(0, lambda: time.sleep(1.5))
    Plan.backward = on_rank(1, once(stop))
    Path(f"losses.{RANK}").write_text("\n".join(train(*begin(transport="process_group"))))
    note("done")


def raises_everywhere() -> None:
    """One job after another in the same processes, each ended by an error on another rank."""
    for rank in range(RANKS):
        for which in ("forward", "backward"):
            Plan.forward = Plan.backward = None
            setattr(Plan, which, on_rank(rank, boom))
            with expected(f"{which} of rank {rank}"):
                train(*begin())
    Plan.forward = Plan.backward = None
    with expected("a cut that fits on all ranks but one"):
        begin()
        pipeline(layers(), seg_method=[0, RANKS] if RANK == 1 else "uniform")
    with expected("nothing"):
        train(*begin())
        sys.stdout.write("trained at last\n")


@contextmanager
def expected(what: str) -> Iterator[None]:
    """Writes the error that ends a job, and ends the job as a script would."""
    sys.stdout.write(f"### {what}\n")
    try:
        yield
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        for line in getattr(error, "__notes__", []):
            sys.stdout.write(f"{line}\n")
        fleet.shutdown()
    else:
        fleet.shutdown()


def configured_differently() -> None:
    mine: dict[str, Any] = {}
    for what, change in {
        "accumulate_steps": {"micro_batches": 2},
        "schedule": {"schedule": "FThenB"},
        "widths": {"width": 9},
        "degrees": {"dp": RANKS, "pp": 1},
    }.items():
        mine = change if RANK == 1 else {}
        with expected(what):
            begin(**mine)
    if RANK == 1:
        os.environ["OMP_NUM_THREADS"] = "2"
    with expected("threads"):
        begin()


def error_between_steps() -> None:
    def careless() -> None:
        raise KeyError("no such sample")

    train(*begin(), between=on_rank(1, careless))


def exit_between_steps() -> None:
    train(*begin(), between=on_rank(1, lambda: sys.exit(3)))


def script_ends_early() -> None:
    train(*begin(), steps=2 if RANK == 1 else 4)


def _report_the_moment(kind: Any, error: BaseException, trace: Any) -> None:
    sys.__excepthook__(kind, error, trace)
    note("told")


if __name__ == "__main__":
    sys.excepthook = _report_the_moment
    globals()[sys.argv[1]]()

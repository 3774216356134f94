"""What watching costs a training: time of its steps, and bits, under all that may look at it.

    python -m benchmarks.watching.cost [--repeats 3]      some two minutes, on two quiet cores

A pipeline of two ranks serves its board. In turn, again and again, its steps are timed while
nobody looks; while ten scrapes a second come, half of them for /metrics; while 1,000 connections
are open that send nothing; while 50 ask and never read; and while requests come with a wrong
token. ``not watched`` is a job whose meter and records are left out. In the end the parameters of
both jobs must have the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.figures import Figure, answer, is_rank, on_ranks, report

STEPS = 40
CONNECTIONS = 1000
MICRO_BATCHES, ROWS, HIDDEN = 8, 32, 256
PORT = 39117
TOKEN = "right"


def _scrape(path: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/{path}", headers=headers)
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as got:
        got.read()


def _ten_a_second(token: str) -> None:
    for path in itertools.cycle(("metrics", "status.json")):
        time.sleep(0.1)
        _scrape(path, token)


def _hold(count: int, request: bytes) -> None:
    """Opens connections, and once more those that are dropped; reads nothing."""
    held: deque[socket.socket] = deque(maxlen=count)
    while True:
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", PORT), 5)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            held.append(sock)
            sock.sendall(request)
        time.sleep(0.001 if len(held) < count else 3 / count)


#: What another process does beside the steps, by name.
BESIDE: dict[str, Callable[[], None]] = {
    "nobody looks": lambda: None,
    "ten scrapes a second": lambda: _ten_a_second(TOKEN),
    "1,000 connections that send nothing": lambda: _hold(CONNECTIONS, b""),
    "50 that ask and never read": lambda: _hold(
        50, f"GET /?token={TOKEN} HTTP/1.1\r\n\r\n".encode()
    ),
    "ten wrong tokens a second": lambda: _ten_a_second("wrong"),
}


@contextmanager
def _beside(name: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.watching.cost", "--beside", name]
    child = subprocess.Popen(command)
    # It begins meanwhile.
    time.sleep(2)
    try:
        yield
    finally:
        child.kill()
        child.wait()


def measure(watched: bool, repeats: int) -> dict[str, Any]:
    """Trains on this rank; returns the times of its steps by what happened beside them."""
    import numpy as np
    import paddle

    from fleetpipe import fleet
    from fleetpipe.contrib.view import reporting
    from fleetpipe.engine import step_meter
    from fleetpipe.engine.observer import BatchObserver
    from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
    from fleetpipe.job.watching import watch

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    if watched:
        strategy.fleetpipe_configs = {"serve": PORT}
    else:
        step_meter.StepMeter = lambda *_: BatchObserver()  # type: ignore[misc, assignment]
        reporting.begin = lambda job, address: None  # type: ignore[assignment]
        watch.STATUS_SECONDS = 3600
    paddle.seed(1)
    fleet.init(is_collective=True, strategy=strategy)
    layers = [LayerDesc(paddle.nn.Linear, HIDDEN, HIDDEN) for _ in range(8)]
    net = PipelineLayer(layers, loss_fn=paddle.nn.MSELoss(), num_stages=2)
    adam = paddle.optimizer.Adam(1e-3, parameters=net.parameters())
    model, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(adam)
    numbers = np.random.default_rng(0)
    shape = [MICRO_BATCHES * ROWS, HIDDEN]
    batch = [paddle.to_tensor(numbers.standard_normal(shape, "float32")) for _ in range(2)]
    times: dict[str, list[float]] = {name: [] for name in BESIDE}
    for _ in range(repeats):
        for name in BESIDE:
            first = os.environ["PADDLE_TRAINER_ID"] == "0"
            with _beside(name) if watched and first else contextlib.nullcontext():
                for _ in range(STEPS):
                    begin = time.perf_counter()
                    model.train_batch(batch, optimizer)
                    times[name].append(1e3 * (time.perf_counter() - begin))
    bits = hashlib.sha256()
    for value in net.state_dict().values():
        bits.update(value.numpy().tobytes())
    fleet.shutdown()
    return {"times": times, "bits": bits.hexdigest()}


def main() -> None:
    """Runs a watched job and one that is not, in turn; prints the median of the steps of each."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=3, help="of all, default: %(default)s")
    options.add_argument("--rank", choices=("watched", "alone"), help=argparse.SUPPRESS)
    options.add_argument("--beside", choices=BESIDE, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.beside:
        BESIDE[chosen.beside]()
        return
    os.environ["FLEETPIPE_WATCH_TOKEN"] = TOKEN
    if is_rank():
        answer(measure(chosen.rank == "watched", chosen.repeats))
        return
    times: dict[str, list[float]] = {}
    bits = set()
    for kind in ("alone", "watched") * 2:
        answers = on_ranks(2, "--rank", kind)
        bits.add(tuple(one["bits"] for one in answers))
        for name, values in answers[0]["times"].items():
            name = name if kind == "watched" else "not watched"
            # The first steps of a part are those in which it begins.
            times.setdefault(name, []).extend(values)
    report([Figure(f"a step, {name}", [median(v)], "ms") for name, v in times.items()], None)
    print("the same bits" if len(bits) == 1 else "OTHER BITS")


if __name__ == "__main__":
    main()

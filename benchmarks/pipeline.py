"""Measures a pipeline on two ranks beside the same model in a single process.

    python benchmarks/pipeline.py [--repeats 7] [--case gpt tiny idle] [--hidden 256 768]
    python benchmarks/pipeline.py --peer PYTHON        beside torch's pipeline too

All kinds of process are alive at once and train in turn, A B C A B C .., while the others sleep, so
that the machine's other load hits all alike. Times are those of one training step, by the clock,
and the time that the busiest process had a processor. Ratios are those of neighbours in time. The
peer is torch's Schedule1F1B over gloo, in the environment of a Python that has torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import paddle

from benchmarks.figures import Figure, parser, report
from benchmarks.workers import gpt, idle
from fleetpipe import numerics
from fleetpipe.schedules import build

WORKERS = Path(__file__).with_name("workers")
# OpenMP's threads spin for 0.2 s after a product before they sleep.
SETTLE_SECONDS = 0.3
START_SECONDS = 120.0
TINY_STEPS = 10
IDLE_RUNS = 60


class Variant:
    """One kind of process under measurement: a single process, or a job of several ranks.

    Args:
        name: In the table.
        threads: Of each process.
        ranks: Number of processes.
        peer: A Python with torch, to measure torch.
    """

    def __init__(self, name: str, threads: int, ranks: int, peer: str | None = None) -> None:
        self.name = name
        self.answers: list[dict[str, Any]] = []
        self._threads = threads
        self._ranks = ranks
        self._peer = peer
        self._connections: list[Connection] = []

    def _command(self, case: gpt.Case, folder: str) -> list[str]:
        kind = "pipeline" if self._ranks > 1 else "single"
        worker = WORKERS / ("torch_worker.py" if self._peer else "pipeline_worker.py")
        launcher: list[str] = []
        if self._ranks > 1:
            launcher = ["-m", "paddle.distributed.launch", "--log_level", "ERROR"]
            if self._peer:
                launcher = ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc_per_node", str(self._ranks), "--log_dir", f"{folder}/log"]
        words = [str(worker), kind, json.dumps(asdict(case)), f"{folder}/driver"]
        return [self._peer or sys.executable, *launcher, *words]

    @contextmanager
    def running(self, case: gpt.Case) -> Iterator[None]:
        """Starts the processes and ends them."""
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            self._folder = folder
            listener.bind(f"{folder}/driver")
            listener.listen()
            listener.settimeout(1.0)
            environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
            process = subprocess.Popen(
                self._command(case, folder), env=environment, stdout=subprocess.DEVNULL
            )
            try:
                arrived = [_arrival(listener, process, folder) for _ in range(self._ranks)]
                self._connections = [c for _, c in sorted((c.recv(), c) for c in arrived)]
                yield
                for connection in self._connections:
                    connection.send(("stop", 0))
                process.wait(START_SECONDS)
            finally:
                process.terminate()
                process.wait()

    def ask(self, command: str, number: int) -> list[Any]:
        """Sends a command to every rank and returns their answers."""
        for connection in self._connections:
            connection.send((command, number))
        try:
            return [connection.recv() for connection in self._connections]
        except EOFError:
            raise SystemExit(_failure(f"{self.name}: a process ended", self._folder)) from None

    def train(self, steps: int) -> None:
        """Trains for some steps; keeps what a step took on the slowest and the busiest rank."""
        answers = self.ask("train", steps)
        self.answers.append(
            {
                "seconds": max(answer["seconds"] for answer in answers),
                "processor": max(answer["processor"] for answer in answers),
                "losses": answers[0]["losses"],
            }
        )

    def repeats(self, key: str) -> list[Any]:
        """Returns one figure of every repeat but the first, which warmed up."""
        return [answer[key] for answer in self.answers[1:]]

    def over(self, other: Variant) -> list[float]:
        """Returns the ratios of its steps to the other's, of neighbours in time."""
        pairs = zip(self.repeats("seconds"), other.repeats("seconds"))
        return [mine / others for mine, others in pairs]

    def figures(self) -> list[Figure]:
        """Returns a step's milliseconds, by the clock and of a processor."""
        kinds = {"seconds": "a step", "processor": "processor of the busiest rank"}
        return [
            Figure(f"{self.name}: {text}", [1e3 * one for one in self.repeats(key)], "ms")
            for key, text in kinds.items()
        ]


def _arrival(listener: socket.socket, process: subprocess.Popen[bytes], folder: str) -> Connection:
    """Waits for one process to connect, as long as its job is alive."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(TimeoutError):
            return Connection(listener.accept()[0].detach())
    raise SystemExit(_failure("a process under measurement did not start", folder))


def _failure(what: str, folder: str) -> str:
    """Returns what happened with the logs of the ranks."""
    logs = [log.read_text() for log in sorted(Path(folder).glob("log/workerlog.*"))]
    return "\n".join([what, *logs])


def compare(name: str, repeats: int, peer: str | None) -> list[Figure]:
    """Trains a case in a pipeline and in single processes, in turn."""
    case = gpt.CASES[name]
    one = Variant("single process, 1 thread", 1, 1)
    pipeline = Variant(f"pipeline, {case.ranks} ranks", 1, case.ranks)
    variants = [one, Variant("single process, 2 threads", 2, 1), pipeline]
    if peer:
        variants += [Variant("torch, 1 thread", 1, 1, peer)]
        variants += [Variant(f"torch, {case.ranks} ranks", 1, case.ranks, peer)]
    with ExitStack() as stack:
        for variant in variants:
            stack.enter_context(variant.running(case))
        for _ in range(repeats + 1):
            for variant in variants:
                time.sleep(SETTLE_SECONDS)
                variant.train(TINY_STEPS if name == "tiny" else 1)
        held = {rank: n for part in pipeline.ask("held", 0) for rank, n in part.items()}
        sockets = pipeline.ask("idle", IDLE_RUNS)
    figures = [figure for variant in variants for figure in variant.figures()]
    figures += speed_ups("pipeline", one, pipeline, case)
    if peer:
        figures += speed_ups("torch", *variants[-2:], case)
        figures.append(Figure("pipeline / torch's pipeline", pipeline.over(variants[-1])))
    planned = build("1F1B", ranks=case.ranks, micro_batches=case.micro_batches).simulate()
    pairs = zip(one.repeats("losses"), pipeline.repeats("losses"))
    figures += [
        Figure("repeats with other losses", [sum(alone != both for alone, both in pairs)]),
        Figure("micro-batches held", [held[rank] for rank in sorted(held)]),
        Figure("micro-batches held, as planned", planned.peak_activations),
        Figure("a message, idle stages: clock", [a["clock"] for a in sockets], "us"),
        Figure("a message, idle stages: processors", [a["processor"] for a in sockets], "us"),
    ]
    return [figure._replace(name=f"{name}: {figure.name}") for figure in figures]


def speed_ups(name: str, one: Variant, several: Variant, case: gpt.Case) -> list[Figure]:
    """Returns the speed-up of a pipeline over its own single process, also to the ideal."""
    ratios = one.over(several)
    shares = [ratio / case.ideal for ratio in ratios]
    return [
        Figure(f"{name}: speed-up", ratios),
        Figure(f"{name}: share of the ideal {case.ideal:.2f}", shares),
    ]


def main() -> None:
    """Runs the cases asked for."""
    numerics.prepare()
    paddle.set_device("cpu")
    options = parser(__doc__, repeats=7)
    cases, sizes = ("gpt", "tiny", "idle"), (256, 768)
    options.add_argument("--case", nargs="+", choices=cases, default=cases, help="default: all")
    options.add_argument(
        "--hidden", nargs="+", type=int, choices=sizes, default=sizes, help="of the GPT"
    )
    options.add_argument("--peer", metavar="PYTHON", help="a Python that has torch")
    arguments = options.parse_args()
    names = [f"gpt {hidden}" for hidden in arguments.hidden] if "gpt" in arguments.case else []
    names += ["tiny"] if "tiny" in arguments.case else []
    figures = []
    for name in names:
        figures += compare(name, arguments.repeats, arguments.peer)
    if "idle" in arguments.case:
        costs = idle.in_one_process(gpt.CASES["tiny"], IDLE_RUNS)
        figures += [Figure(f"idle stages: {key}", [value], "us") for key, value in costs.items()]
    report(figures, arguments.json)


if __name__ == "__main__":
    main()

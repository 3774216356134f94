"""Measures a pipeline on two ranks beside the same model in a single process.

    python benchmarks/pipeline.py [--repeats 7] [--case gpt|tiny|idle] [--json FILE]

All kinds of process are alive at once and train in turn, A B C A B C .., while the others sleep, so
that the machine's other load hits all alike. Times are those of one training step: medians with the
range of all repeats by the clock, and the time that the busiest process had a processor.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gpt
import idle
import paddle

from fleetpipe import numerics
from fleetpipe.schedules import build

WORKER = Path(__file__).with_name("pipeline_worker.py")
# OpenMP's threads spin for 0.2 s after a product before they sleep.
SETTLE_SECONDS = 0.3
START_SECONDS = 120.0
STEPS = {"gpt": 1, "tiny": 10}
IDLE_RUNS = 60


class Variant:
    """One kind of process under measurement: a single process, or a job of several ranks."""

    def __init__(self, name: str, threads: int, ranks: int) -> None:
        self.name = name
        self.answers: list[dict[str, Any]] = []
        self._threads = threads
        self._ranks = ranks
        self._connections: list[Connection] = []

    @contextmanager
    def running(self, case: str) -> Iterator[None]:
        """Starts the processes and ends them."""
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = f"{folder}/driver"
            listener.bind(address)
            listener.listen()
            listener.settimeout(1.0)
            command = [str(WORKER), "pipeline" if self._ranks > 1 else "single", case, address]
            if self._ranks > 1:
                launcher = ["-m", "paddle.distributed.launch", "--log_level", "ERROR"]
                launcher += ["--nproc_per_node", str(self._ranks), "--log_dir", f"{folder}/log"]
                command = [*launcher, *command]
            environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
            process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=subprocess.DEVNULL
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
        return [connection.recv() for connection in self._connections]

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

    def figures(self) -> dict[str, float]:
        """Returns a step's milliseconds: median and range by the clock, median of the processor."""
        times = self.repeats("seconds")
        return {
            "median_ms": round(statistics.median(times) * 1e3, 2),
            "least_ms": round(min(times) * 1e3, 2),
            "most_ms": round(max(times) * 1e3, 2),
            "processor_ms": round(statistics.median(self.repeats("processor")) * 1e3, 2),
        }


def _arrival(listener: socket.socket, process: subprocess.Popen[bytes], folder: str) -> Connection:
    """Waits for one process to connect, as long as its job is alive."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(TimeoutError):
            return Connection(listener.accept()[0].detach())
    logs = [log.read_text() for log in sorted(Path(folder).glob("log/workerlog.*"))]
    raise SystemExit("\n".join(["a process under measurement did not start", *logs]))


def compare(name: str, repeats: int) -> dict[str, Any]:
    """Trains a case in a pipeline and in single processes, in turn."""
    case = gpt.CASES[name]
    one = Variant("single process, 1 thread", 1, 1)
    two = Variant("single process, 2 threads", 2, 1)
    pipeline = Variant(f"pipeline, {case.ranks} ranks of 1 thread", 1, case.ranks)
    variants = (one, two, pipeline)
    with one.running(name), two.running(name), pipeline.running(name):
        for _ in range(repeats + 1):
            for variant in variants:
                time.sleep(SETTLE_SECONDS)
                variant.train(STEPS[name])
        held = {rank: n for part in pipeline.ask("held", 0) for rank, n in part.items()}
        sockets = pipeline.ask("idle", IDLE_RUNS)
    # Neighbours in time are compared, so that load which comes and goes falls out.
    pairs = zip(one.repeats("seconds"), pipeline.repeats("seconds"))
    ratio = statistics.median(ours / alone for alone, ours in pairs)
    planned = build("1F1B", ranks=case.ranks, micro_batches=case.micro_batches).simulate()
    return {
        "case": vars(case),
        "variants": {variant.name: variant.figures() for variant in variants},
        "pipeline_over_single": round(ratio, 3),
        "speed_up": round(1 / ratio, 3),
        "ideal_speed_up": round(case.ideal, 3),
        "share_of_ideal": round(1 / ratio / case.ideal, 3),
        "same_losses": one.repeats("losses") == pipeline.repeats("losses"),
        "held_micro_batches": [held[rank] for rank in sorted(held)],
        "planned_micro_batches": list(planned.peak_activations),
        "socket_message_us": round(max(answer["clock"] for answer in sockets), 1),
        "socket_message_processor_us": round(max(a["processor"] for a in sockets), 1),
    }


def show(name: str, result: dict[str, Any]) -> None:
    """Prints the result of a case as a table."""
    case = result["case"]
    print(
        f"{name}: {case['blocks']} blocks of hidden {case['hidden']}, p={case['ranks']}, "
        f"m={case['micro_batches']}, micro-batch {case['rows']} x {case['length']}"
    )
    for variant, figures in result["variants"].items():
        print(
            f"  {variant:<32}{figures['median_ms']:>10.2f} ms a step"
            f"   ({figures['least_ms']:.2f} to {figures['most_ms']:.2f})"
            f"   processor {figures['processor_ms']:.2f}"
        )
    for key, text in (
        ("pipeline_over_single", "pipeline / single process, 1 thread"),
        ("speed_up", "speed-up"),
        ("ideal_speed_up", "ideal speed-up, 2m / (m + 1)"),
        ("share_of_ideal", "share of the ideal"),
        ("same_losses", "losses equal in every bit"),
        ("held_micro_batches", "micro-batches held, by rank"),
        ("planned_micro_batches", "micro-batches held, as planned"),
        ("socket_message_us", "us a message, idle stages, clock"),
        ("socket_message_processor_us", "us a message, idle stages, processors"),
    ):
        print(f"  {text:<40}{result[key]}")


def main() -> None:
    """Runs the cases asked for."""
    numerics.prepare()
    paddle.set_device("cpu")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each variant")
    parser.add_argument("--case", choices=[*gpt.CASES, "idle"], help="default: all")
    parser.add_argument("--json", type=Path, help="write the figures as JSON too")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"paddle": paddle.__version__, "cpus": os.cpu_count()}
    print(f"paddlepaddle {paddle.__version__}, {os.cpu_count()} CPUs")
    for name in gpt.CASES:
        if arguments.case in (None, name):
            results[name] = compare(name, arguments.repeats)
            show(name, results[name])
    if arguments.case in (None, "idle"):
        costs = idle.in_one_process(gpt.CASES["tiny"], IDLE_RUNS)
        results["idle"] = {key: round(value, 2) for key, value in costs.items()}
        print("idle stages in one process")
        print(f"  {'us an action':<40}{costs['action']:.2f}")
        print(f"  {'us a message in memory':<40}{costs['message_in_memory']:.2f}")
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Kills a rank of a job again and again, and measures what is lost and how soon it goes on.

    python benchmarks/checkpoints/restart.py [--keep_state] [--kills 30] [--ranks 3] [--seed 1]

A rank is killed (SIGKILL) in every life of one job, at chosen moments of first, middle and last
rank in turn; see ``workers/restart_worker.py``. Then the final parameters are compared with those
of the same job that nobody disturbs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, parser, report

WORKER = Path(__file__).resolve().parents[1] / "workers" / "restart_worker.py"
#: Enough for the steps that the lives do before they are killed.
STEPS_OF_A_LIFE = 7

Event = dict[str, Any]


def run(options: argparse.Namespace, count: int, folder: Path) -> list[Event]:
    """Runs a job that is killed ``count`` times; returns its events in their order."""
    folder.mkdir()
    steps = options.kills * STEPS_OF_A_LIFE
    command = [sys.executable, "-m", "fleetpipe", "launch", "--max_restart", str(count)]
    command += ["--nproc_per_node", str(options.ranks), "--log_dir", str(folder / "log")]
    command += ["--keep_state"] if options.keep_state else []
    command += [str(WORKER), str(options.seed), str(count), str(steps), str(folder)]
    with (folder / "output").open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False)
    if done.returncode:
        output_text = (folder / "output").read_text()
        raise SystemExit(f"the job ended with {done.returncode}:\n{output_text}")
    events = map(json.loads, (folder / "events").read_text().splitlines())
    return sorted(events, key=lambda event: event["at"])


def bits(events: list[Event]) -> dict[int, str]:
    """Returns the bits of each rank's final parameters."""
    return {e["rank"]: e["bits"] for e in events if e["what"] == "bits"}


def recoveries(events: list[Event], ranks: int) -> list[Event]:
    """Returns for each kill what was lost, and how many seconds later the next step began."""
    recovered = []
    for kill in [event for event in events if event["what"] == "killed"]:
        begun = {e["rank"]: e["step"] for e in events if _is_before(e, kill)}
        later = [e for e in events if e["what"] == "goes on" and e["life"] > kill["life"]]
        # A life that is killed while it starts does not go on.
        lives = [e["life"] for e in later]
        alive = next(number for number in lives if lives.count(number) == ranks)
        on = [e for e in later if e["life"] == alive][-1]
        recovered.append(
            {
                "moment": kill["moment"],
                "rank": kill["rank"],
                # The step in which the kill came is done again in any case.
                "lost": max(0, min(begun.values(), default=0) - on["step"]),
                "seconds": on["at"] - kill["at"],
                "loading": on["seconds"],
            }
        )
    return recovered


def _is_before(event: Event, kill: Event) -> bool:
    """Whether a step began in the life that was killed, before it was."""
    return event["what"] == "begun" and event["life"] == kill["life"] and event["at"] < kill["at"]


def main() -> None:
    """Runs both jobs and reports."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--ranks", type=int, default=3)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep_state", action="store_true")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        disturbed = run(arguments, arguments.kills, Path(place, "disturbed"))
        undisturbed = run(arguments, 0, Path(place, "undisturbed"))
    recovered = recoveries(disturbed, arguments.ranks)
    figures = []
    for moment in [*dict.fromkeys(one["moment"] for one in recovered), "all"]:
        ones = [one for one in recovered if moment in (one["moment"], "all")]
        figures += [
            Figure(f"{moment}: steps lost", [one["lost"] for one in ones]),
            Figure(f"{moment}: seconds to go on", [one["seconds"] for one in ones], "s"),
        ]
    loading = [one["loading"] for one in recovered]
    figures.append(Figure("of which import, joining and restoring", loading, "s"))
    other = sum(bits(disturbed)[rank] != bits(undisturbed)[rank] for rank in bits(undisturbed))
    figures.append(Figure("ranks that end with other parameters", [other]))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()

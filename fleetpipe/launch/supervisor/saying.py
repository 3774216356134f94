"""What the supervisor says: how a life ended, and why there is no other."""

from __future__ import annotations

import sys

from fleetpipe.launch.supervisor.verdict import Verdict


def account(number: int, verdict: Verdict) -> str:
    """Says how a life ended that did not do its work."""
    when = "" if verdict.step is None else f" in step {verdict.step}"
    lines = [f"life {number} ended{when}: {verdict.culprit}"]
    return "\n".join([*lines, *(f"    | {line}" for line in verdict.details.splitlines())])


def poison(verdict: Verdict) -> str:
    """Says why a job is not started again."""
    what = "the job failed twice in a row with the same error, and before any step that it told of"
    if verdict.step is not None:
        what = f"step {verdict.step} failed twice in a row"
    to_do = "look at the data of this step and at the error above"
    if verdict.disk_full:
        to_do = "free space on the disk that the error above names, which is full"
    return (
        f"{what}: it is not started again\n"
        f"  what to do: {to_do}; a job that is started anew goes on from its checkpoint"
    )


def say(text: str) -> None:
    """Tells the user."""
    sys.stdout.flush()
    sys.stderr.write(f"fleetpipe: {text}\n")
    sys.stderr.flush()

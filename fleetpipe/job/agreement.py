"""Checks that all ranks have the same versions, options and models before they run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

from fleetpipe import numerics
from fleetpipe.errors import ConfigError
from fleetpipe.job import meeting
from fleetpipe.transport import Store
from fleetpipe.version import __version__

_PLACE = "the comparison of what each rank runs"
#: Differences that a message shows; the first ones tell enough.
_MOST_SHOWN = 4


def facts(*options: Any) -> dict[str, str]:
    """Returns the facts on which all ranks must agree, by subject: versions, options, settings.

    Args:
        *options: Options, as dataclasses. Ranks need only agree on whether ``trace``, a folder, is
            set: its name matters to rank 0 alone, as all of ``serve`` does.
    """
    settings = {**numerics.settings(), "fleetpipe": __version__}
    for options_of in options:
        for name, value in asdict(options_of).items():
            if name != "serve":
                settings[name] = str(value is not None) if name == "trace" else repr(value)
    return settings


def require_agreement(
    store: Store,
    key: str,
    facts: Mapping[str, str],
    timeout: float,
    gone: Callable[[], Collection[int]] = tuple,
) -> None:
    """Compares the facts that each rank of the job has. Collective over the job.

    Args:
        store: The job's store. Ranks compare digests there, and the facts only if the digests
            differ.
        key: The key in the store, new for each comparison.
        facts: What must be the same on all ranks, by subject.
        timeout: Seconds that the ranks may take to arrive.
        gone: Returns the ranks that have ended.

    Raises:
        ConfigError: Some rank has other facts; the message shows both sides. Every rank raises.
        PeerFailed: Some rank ended before it arrived.
        PipelineTimeout: Some rank did not arrive; the message says which.
    """
    text = json.dumps(dict(facts), sort_keys=True)
    store.set(f"{key}/facts/{meeting.own_rank()}", text)
    store.set(f"{key}/digest/{meeting.own_rank()}", hashlib.sha256(text.encode()).hexdigest())
    meeting.meet(store, f"{key}/published", timeout, _PLACE, gone)
    ranks = range(meeting.world_size())
    digests = [store.get(f"{key}/digest/{rank}") for rank in ranks]
    differing = [rank for rank in ranks if digests[rank] != digests[0]]
    if differing:
        first, other = (json.loads(store.get(f"{key}/facts/{rank}")) for rank in (0, differing[0]))
        error = _disagreement(first, other, differing)
        # Nobody raises, and so ends the store or others' waits, before all have seen both sides.
        meeting.meet(store, f"{key}/compared", timeout, _PLACE, gone)
        meeting.let_others_go(store, f"{key}/seen")
        raise error


def _disagreement(
    first: Mapping[str, str], other: Mapping[str, str], differing: list[int]
) -> ConfigError:
    subjects = [s for s in {**first, **other} if first.get(s) != other.get(s)]

    def join(facts: Mapping[str, str]) -> str:
        shown = [f"{s} = {facts.get(s, 'nothing')}" for s in subjects[:_MOST_SHOWN]]
        return "; ".join(shown) + ("; .." if len(subjects) > _MOST_SHOWN else "")

    also = f" (nor do ranks {differing[1:]})" if len(differing) > 1 else ""
    return ConfigError(
        f"ranks 0 and {differing[0]} of the job do not run the same{also}",
        expected=f"as on rank 0: {join(first)}",
        got=f"on rank {differing[0]}: {join(other)}",
        fix="start all ranks with the same script, arguments, environment and versions",
    )

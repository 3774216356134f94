"""``--cluster`` of ``fleetpipe estimate`` and ``fleetpipe plan``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetpipe.arguments import positive, using
from fleetpipe.contrib.clusters.cluster import Cluster
from fleetpipe.contrib.clusters.estimate import TrainingJob
from fleetpipe.contrib.clusters.layout_search import CHOICES, search
from fleetpipe.contrib.clusters.sensitivity import limits
from fleetpipe.contrib.clusters.showing import as_json, plot, tables
from fleetpipe.contrib.clusters.transformer import RECOMPUTES, Transformer
from fleetpipe.contrib.clusters.workload import read_model
from fleetpipe.errors import ConfigError
from fleetpipe.profiling.profile import Profile
from fleetpipe.schedules import canonical_name


def configure_cluster(parser: argparse.ArgumentParser) -> None:
    """Adds ``--cluster`` and the options that choose layouts of it."""
    add = parser.add_argument_group("a cluster that need not be there").add_argument
    add("--cluster", type=Path, metavar="FILE", help="its description, .toml or JSON")
    add("--batch", type=positive, metavar="N", help="sequences of a step, of all replicas together")
    add("--top", type=positive, default=10, metavar="N", help="layouts to show (default: 10)")
    add(
        "--only",
        type=_choice,
        action="append",
        default=[],
        metavar="WHAT=VALUE,..",
        help=f"try no others; WHAT is {', '.join(CHOICES)}; may be given again",
    )


def require_no_cluster(arguments: argparse.Namespace, *, plans: bool = False) -> None:
    """Checks the arguments if no cluster is given.

    Args:
        arguments: The arguments.
        plans: Whether a plan is wanted, which needs a number of ranks.
    """
    for option in ("batch", "only"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--{option} is for layouts of a cluster", fix="give --cluster FILE too"
            )
    if plans and arguments.ranks is None:
        raise ConfigError(
            "a plan is for a number of ranks", got="none", fix="give --ranks, or --cluster FILE"
        )


def estimate(arguments: argparse.Namespace) -> str:
    """Returns the output of ``fleetpipe estimate --cluster``; draws a picture if asked for.

    Raises:
        ConfigError: A file is not valid, or no layout fits.
    """
    job = _job(arguments)
    outcome = search(job, _restrictions(arguments), arguments.top)
    if arguments.plot is not None:
        with using("--plot", arguments.plot, "a .png, .svg or .pdf file that can be written"):
            plot(outcome.best, arguments.plot)
    rows = limits(job, outcome.best[0])
    return (as_json if arguments.format == "json" else tables)(job, outcome, rows)


def profile_of_fastest(arguments: argparse.Namespace) -> Profile:
    """Returns the profile of a pipeline of the fastest layout, and sets the plan's sizes from it.

    Raises:
        ConfigError: The same errors as :func:`estimate`.
    """
    job = _job(arguments)
    best = search(job, _restrictions(arguments), 1).best[0]
    layout, cluster = best.layout, job.cluster
    arguments.ranks, arguments.micro_batches = layout.pipeline, best.micro_batches
    arguments.memory_cap = arguments.memory_cap or cluster.memory
    arguments.optimizer_copies = job.optimizer_copies / layout.sharding
    return Profile(job.costs(layout), links=(cluster.link(layout.neighbour),))


def _job(arguments: argparse.Namespace) -> TrainingJob:
    if arguments.batch is None:
        raise ConfigError(
            "a step on a cluster trains on a batch", got="none", fix="give --batch, in sequences"
        )
    model = read_model(arguments.file)
    master = isinstance(model, Transformer) and model.dtype != "float32"
    copies = arguments.optimizer_copies + master
    return TrainingJob(model, Cluster.read(arguments.cluster), arguments.batch, copies)


def _restrictions(arguments: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Returns the values that options restrict layouts to; ``--ranks`` are those of a pipeline."""
    ranks = arguments.ranks
    named = {} if ranks is None else {"pp": (ranks,) if isinstance(ranks, int) else tuple(ranks)}
    return {**named, **dict(arguments.only)}


def _choice(text: str) -> tuple[str, tuple[Any, ...]]:
    """Reads an option such as ``pp=8,16``."""
    what, _, values = text.partition("=")
    if what not in CHOICES or not values:
        raise argparse.ArgumentTypeError(
            f"invalid: {text!r}; give one of {', '.join(CHOICES)}, = and values"
        )
    try:
        return what, tuple(map(_EACH.get(what, positive), values.split(",")))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _recompute(text: str) -> str:
    if text not in RECOMPUTES:
        raise argparse.ArgumentTypeError(
            f"invalid recompute: {text!r}; give {', '.join(RECOMPUTES)}"
        )
    return text


_EACH: dict[str, Callable[[str], Any]] = {"schedule": canonical_name, "recompute": _recompute}

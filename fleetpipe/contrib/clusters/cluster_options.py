"""``--cluster`` of ``fleetpipe estimate`` and ``fleetpipe plan``: its options and its output.

Estimates are written as tables, as JSON, and as a picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetpipe.arguments import positive, using
from fleetpipe.contrib.clusters import StepEstimate, TrainingJob
from fleetpipe.contrib.clusters.cluster import Cluster
from fleetpipe.contrib.clusters.layout_search import (
    CHOICES,
    FastestLayouts,
    ResourceLimit,
    limits,
    search,
)
from fleetpipe.contrib.clusters.workload import RECOMPUTES, Transformer, read_model
from fleetpipe.contrib.pictures.picture import new_figure
from fleetpipe.errors import ConfigError
from fleetpipe.profiling.memory import show_bytes, show_seconds
from fleetpipe.profiling.profile import Profile
from fleetpipe.representation import table
from fleetpipe.schedules import canonical_name

#: The labels of the parts of a step, by the field of a ``StepEstimate`` with their seconds.
_STEP_PARTS = {
    "computing": "computes and exchanges",
    "bubble": "waits (bubble)",
    "exchange": "gradients",
    "update": "optimizer",
}


def tables(job: TrainingJob, outcome: FastestLayouts, rows: Sequence[ResourceLimit]) -> str:
    """Returns the text of a search: the best layouts, and the memory and limits of the first.

    Args:
        job: The job.
        outcome: The result of the search.
        rows: The resources that limit the fastest layout.
    """
    best = outcome.best[0]
    head = (
        *("layout", "schedule", "chunks", "micro-batch", "m", "recompute"),
        *("a step", "MFU", "bubble", "most memory"),
    )
    lines: list[tuple[str, ...]] = [head]
    lines += [_layout_row(estimate) for estimate in outcome.best]
    parts = ", ".join(
        f"{label} {getattr(best, name) / best.seconds:.1%}" for name, label in _STEP_PARTS.items()
    )
    text = [
        f"{job.cluster.ranks} devices, a batch of {job.batch}: {outcome.layouts} layouts,"
        f" {outcome.played} simulated",
        table(lines, left=(0, 1)),
        "",
        f"of the fastest, a step: {parts}",
        table(list(_memory_rows(best)), left=()),
        "",
        table(list(_limit_rows(best, rows)), left=(0,)),
    ]
    if outcome.lacking is not None:
        faster = outcome.lacking
        text += [
            "",
            f"with {show_bytes(faster.peak)} a device: {show_seconds(faster.seconds)} a step,"
            f" {_describe_layout(faster)}",
        ]
    return "\n".join(text)


def _describe_layout(estimate: StepEstimate) -> str:
    """Returns a layout in one line, such as ``pp8 tp4 ZBV v2 b1 m48, full recompute``."""
    layout = estimate.layout
    recompute = "" if layout.recompute == "none" else f", {layout.recompute} recompute"
    sizes = f"v{layout.chunks} b{layout.micro_batch} m{estimate.micro_batches}"
    return f"{layout} {layout.schedule} {sizes}{recompute}"


def _layout_row(estimate: StepEstimate) -> tuple[str, ...]:
    """Returns the row of a layout in the table of the best layouts."""
    layout = estimate.layout
    return (
        str(layout),
        layout.schedule,
        str(layout.chunks),
        str(layout.micro_batch),
        str(estimate.micro_batches),
        layout.recompute,
        show_seconds(estimate.seconds),
        f"{estimate.utilisation:.1%}" if estimate.utilisation else "-",
        f"{estimate.bubble / estimate.seconds:.1%}",
        show_bytes(estimate.peak),
    )


def _memory_rows(best: StepEstimate) -> Iterator[tuple[str, ...]]:
    """Yields a heading, and rows with the memory of the first, the fullest and the last rank."""
    yield ("rank", *best.memory[0]._fields, "in all")
    fullest = max(range(len(best.memory)), key=lambda rank: best.memory[rank].total)
    for rank in sorted({0, fullest, len(best.memory) - 1}):
        memory = best.memory[rank]
        yield (str(rank), *map(show_bytes, memory), show_bytes(memory.total))


def _limit_rows(best: StepEstimate, rows: Sequence[ResourceLimit]) -> Iterator[tuple[str, ...]]:
    """Yields a heading, and a row for each resource that limits the fastest layout."""
    yield ("what limits it", "costs a step", "share", "10 % more, twice the batch or hosts")
    for row in rows:
        costs = (show_seconds(row.seconds), f"{row.seconds / best.seconds:.1%}")
        yield (row.resource, *(costs if row.seconds else ("", "")), f"{row.gain:+.1%}")


def as_json(job: TrainingJob, outcome: FastestLayouts, rows: Sequence[ResourceLimit]) -> str:
    """Returns as JSON what :func:`tables` returns as text; the arguments are the same."""
    content: dict[str, Any] = {
        "devices": job.cluster.ranks,
        "batch": job.batch,
        "layouts": outcome.layouts,
        "simulated": outcome.played,
        "best": [_as_dict(estimate) for estimate in outcome.best],
        "limits": [row._asdict() for row in rows],
        "with_more_memory": None if outcome.lacking is None else _as_dict(outcome.lacking),
    }
    return json.dumps(content)


def _as_dict(estimate: StepEstimate) -> dict[str, Any]:
    memory = [{**rank._asdict(), "total": rank.total} for rank in estimate.memory]
    return {**estimate._asdict(), "layout": estimate.layout._asdict(), "memory": memory}


def plot(estimates: Sequence[StepEstimate], path: str | Path) -> None:
    """Draws the parts of the step time of layouts, and the memory of their fullest rank.

    Args:
        estimates: The layouts, the fastest first.
        path: File to write: .png, .svg or .pdf.
    """
    names = [_describe_layout(estimate) for estimate in estimates][::-1]
    above: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 3}
    with new_figure(path, 12.0, 1.8 + 0.4 * len(estimates), 9) as figure:
        times, sizes = figure.subplots(1, 2, sharey=True)
        parts = [[getattr(estimate, name) for name in _STEP_PARTS] for estimate in estimates]
        _draw_bars(times, parts, 1.0)
        times.set_xlabel("seconds of a step")
        times.set_yticks(range(len(names)), names)
        times.legend(_STEP_PARTS.values(), fontsize="small", frameon=False, **above)
        fullest = [max(each.memory, key=lambda memory: memory.total) for each in estimates]
        _draw_bars(sizes, [list(memory) for memory in fullest], 2.0**30)
        sizes.set_xlabel("GiB of the fullest rank")
        sizes.legend(fullest[0]._fields, fontsize="small", frameon=False, **above)


def _draw_bars(area: Any, rows: Sequence[Sequence[float]], unit: float) -> None:
    """Draws a horizontal bar for each row, from the top, with the row's parts one after another.

    ``area`` are matplotlib's axes, on which a length of ``unit`` counts as one.
    """
    lefts = [0.0] * len(rows)
    for number, part in enumerate(zip(*rows)):
        widths = [value / unit for value in part]
        shade = str(0.25 + 0.15 * number)
        area.barh(range(len(rows))[::-1], widths, left=lefts, color=shade, edgecolor="white")
        lefts = [left + width for left, width in zip(lefts, widths)]
    area.spines[["top", "right"]].set_visible(False)


def configure_cluster(parser: argparse.ArgumentParser) -> None:
    """Adds ``--cluster`` and the options that choose layouts of it."""
    add = parser.add_argument_group("a cluster that need not be there").add_argument
    add("--cluster", type=Path, metavar="FILE", help="its description, .toml or JSON")
    add("--batch", type=positive, metavar="N", help="sequences of a step, of all replicas together")
    add("--top", type=positive, default=10, metavar="N", help="layouts to show (default: 10)")
    add(
        "--only",
        type=_parse_only,
        action="append",
        default=[],
        metavar="WHAT=VALUE,..",
        help=f"try no others; WHAT is {', '.join(CHOICES)}; may be given again",
    )


def require_no_cluster(arguments: argparse.Namespace, *, plans: bool = False) -> None:
    """Raises ConfigError if the options do not fit a command without ``--cluster``.

    Args:
        arguments: The options of ``fleetpipe estimate`` or ``fleetpipe plan``.
        plans: Whether the command makes a plan, which needs ``--ranks``.
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
    """Returns the output of ``fleetpipe estimate --cluster``; with ``--plot`` draws a picture too.

    Raises:
        ConfigError: A file is not valid, or no layout fits.
    """
    job = _read_job(arguments)
    outcome = search(job, _restrictions(arguments), arguments.top)
    if arguments.plot is not None:
        with using("--plot", arguments.plot, "a .png, .svg or .pdf file that can be written"):
            plot(outcome.best, arguments.plot)
    rows = limits(job, outcome.best[0])
    return (as_json if arguments.format == "json" else tables)(job, outcome, rows)


def profile_of_fastest(arguments: argparse.Namespace) -> Profile:
    """Returns the layers' costs under the fastest layout of a cluster, for ``fleetpipe plan``.

    Sets these options of the plan from that layout: ranks, micro-batches, memory limit, and copies
    of the optimizer's state.

    Raises:
        ConfigError: A file is not valid, or no layout fits.
    """
    job = _read_job(arguments)
    best = search(job, _restrictions(arguments), 1).best[0]
    layout, cluster = best.layout, job.cluster
    arguments.ranks, arguments.micro_batches = layout.pipeline, best.micro_batches
    arguments.memory_cap = arguments.memory_cap or cluster.memory
    arguments.optimizer_copies = job.optimizer_copies / layout.sharding
    return Profile(job.costs(layout), links=(cluster.link(layout.neighbour),))


def _read_job(arguments: argparse.Namespace) -> TrainingJob:
    """Reads the files of the model and the cluster that the options name."""
    if arguments.batch is None:
        raise ConfigError(
            "a step on a cluster trains on a batch", got="none", fix="give --batch, in sequences"
        )
    model = read_model(arguments.file)
    master = isinstance(model, Transformer) and model.dtype != "float32"
    copies = arguments.optimizer_copies + master
    return TrainingJob(model, Cluster.read(arguments.cluster), arguments.batch, copies)


def _restrictions(arguments: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Returns the values that ``--ranks`` (of a pipeline) and ``--only`` let ``search`` try."""
    ranks = arguments.ranks
    if ranks is None:
        return dict(arguments.only)
    return {"pp": (ranks,) if isinstance(ranks, int) else tuple(ranks), **dict(arguments.only)}


def _parse_only(text: str) -> tuple[str, tuple[Any, ...]]:
    """Parses a value of ``--only`` such as ``pp=8,16`` into its name and its values."""
    name, _, values = text.partition("=")
    if name not in CHOICES or not values:
        raise argparse.ArgumentTypeError(
            f"invalid: {text!r}; give one of {', '.join(CHOICES)}, = and values"
        )
    try:
        return name, tuple(map(_PARSERS.get(name, positive), values.split(",")))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_recompute(text: str) -> str:
    """Checks one value of ``--only recompute=..``, and returns it."""
    if text not in RECOMPUTES:
        raise argparse.ArgumentTypeError(
            f"invalid recompute: {text!r}; give {', '.join(RECOMPUTES)}"
        )
    return text


#: The functions that parse a value of ``--only``, by its name; other values are whole numbers.
_PARSERS: dict[str, Callable[[str], Any]] = {
    "schedule": canonical_name,
    "recompute": _parse_recompute,
}

"""The commands ``fleetpipe plan`` and ``fleetpipe estimate``: they read a profile, run no model.

``estimate`` prints the time and memory of every schedule on several numbers of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fleetpipe.arguments import new_file, number, positive, using
from fleetpipe.errors import ConfigError
from fleetpipe.extras import extra
from fleetpipe.profiling.candidates import Candidate, PlanTask
from fleetpipe.profiling.memory import peak_bytes, show_bytes, show_seconds
from fleetpipe.profiling.planner import SEARCH, plan
from fleetpipe.profiling.profile import Profile
from fleetpipe.representation import table

#: The largest tasks that these commands plan, which take some seconds: ranks x micro-batches, and
#: layers x ranks.
MOST_FORWARDS, MOST_CUTS = 10_000, 2_000


class Estimate(NamedTuple):
    """The costs of one schedule on some ranks, without recompute.

    Attributes:
        ranks: Ranks of the pipeline.
        chunks: Chunks on each rank.
        schedule: The schedule's name.
        seconds: Time of a batch, without the optimizer's step.
        peak_bytes: The most bytes that each rank uses.
    """

    ranks: int
    chunks: int
    schedule: str
    seconds: float
    peak_bytes: tuple[int, ...]


def estimates(
    profile: Profile, ranks: Iterable[int], micro_batches: int, optimizer_copies: float = 2
) -> list[Estimate]:
    """Returns the time and memory of every schedule on several numbers of ranks.

    Of the first cuts that the planner tries, and of the options of a schedule, the fastest count.

    Args:
        profile: The costs of the layers.
        ranks: The numbers of ranks. Schedules with more stages than layers are left out.
        micro_batches: Micro-batches of a batch, m.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.

    Returns:
        The estimates, by ranks and then by time.
    """
    rows = []
    for count in ranks:
        search = frozenset(("partition", "placement", "schedule"))
        task = PlanTask(profile, count, micro_batches, math.inf, search, optimizer_copies)
        best_estimates: dict[tuple[int, str], Estimate] = {}
        for shape in task.shapes():
            for schedule in task.schedules(shape):
                tried = [task.evaluate(schedule, cut) for cut in task.cuts(shape)]
                fitting = [one for one in tried if isinstance(one, Candidate)]
                best = min(fitting, key=lambda one: one.seconds)
                parts = [part.cut(best.boundaries) for part in task.of_slices]
                stages = task.stages.cut(best.boundaries)
                slices = parts if schedule.slices > 1 else ()
                peaks = peak_bytes(schedule, stages, optimizer_copies, slices)
                one = Estimate(count, shape.chunks, schedule.name, best.seconds, peaks)
                # Of several options of a schedule, only the fastest.
                key = shape.chunks, schedule.name
                if key not in best_estimates or one.seconds < best_estimates[key].seconds:
                    best_estimates[key] = one
        rows += sorted(best_estimates.values(), key=lambda one: one.seconds)
    return rows


def estimates_table(estimates_shown: Sequence[Estimate], alone: float) -> str:
    """Writes estimates as a table, with the speed-up over one rank.

    Args:
        estimates_shown: The estimates.
        alone: Seconds that one rank takes for a batch.
    """
    rows = [("ranks", "chunks", "schedule", "a batch", "speed-up", "most memory", "on rank")]
    for one in estimates_shown:
        most = max(one.peak_bytes)
        rows.append(
            (
                str(one.ranks),
                str(one.chunks),
                one.schedule,
                show_seconds(one.seconds),
                f"{alone / one.seconds:.2f}" if one.seconds else "-",
                show_bytes(most),
                str(one.peak_bytes.index(most)),
            )
        )
    return table(rows, left=(2,))


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe plan`` to its parser."""
    _add_profile(parser)
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="P",
        help="ranks of the pipeline; with --cluster, those of the fastest layout by default",
    )
    extra("clusters.cluster_options").configure_cluster(parser)
    parser.add_argument(
        "--memory-cap",
        metavar="SIZE",
        help="most that a rank may have in use, such as 2GiB or 500MB; no cap by default",
    )
    for axis, shared in {"ep": "experts", "sep": "sequences", "cp": "sequences"}.items():
        parser.add_argument(
            f"--{axis}-degree",
            type=positive,
            metavar="N",
            help=f"ranks that are to share {shared} along {axis}; by default those of the profile",
        )
    parser.add_argument(
        "--search",
        type=lambda text: text.split(","),
        default=list(SEARCH),
        metavar="WHAT,..",
        help=f"what is chosen (default: {','.join(SEARCH)})",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=new_file,
        metavar="FILE",
        help="write the plan, for PipelineLayer(plan=FILE)",
    )
    parser.add_argument(
        "--plot",
        type=new_file,
        metavar="FILE",
        help="draw when each rank computes what to a .png, .svg or .pdf (needs matplotlib)",
    )
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="tables, or the plan as JSON"
    )


def configure_estimate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe estimate`` to its parser."""
    _add_profile(parser)
    parser.add_argument(
        "--ranks",
        type=lambda text: [positive(part) for part in text.split(",")],
        metavar="P,P,..",
        help="numbers of ranks to compare (default: those of 1,2,4,8 that have layers enough)",
    )
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="a table, or JSON"
    )
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="JSON")
    parser.add_argument(
        "--plot",
        type=new_file,
        metavar="FILE",
        help="with --cluster: draw the layouts to a .png, .svg or .pdf (needs matplotlib)",
    )
    extra("clusters.cluster_options").configure_cluster(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that both commands have: the profile, and the training to plan."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a profile, or a list of layers by hand, as JSON; with --cluster also a transformer",
    )
    parser.add_argument(
        "--micro-batches",
        type=positive,
        default=8,
        metavar="M",
        help="micro-batches of a batch (default: 8); with --cluster see --batch",
    )
    parser.add_argument(
        "--optimizer-copies",
        type=number,
        default=2,
        metavar="N",
        help="tensors of a gradient's size that the optimizer keeps: 2 for Adam (default), 1 with"
        " momentum, 0 for SGD; where a model trains in 16 bits, the master copy comes besides",
    )


def _require_moderate(profile: Profile, ranks: int, micro_batches: int) -> None:
    """Raises ConfigError for a task that would take minutes to plan, or all memory."""
    for what, size, most in (
        ("ranks x micro-batches", ranks * micro_batches, MOST_FORWARDS),
        ("layers x ranks", len(profile.layers) * ranks, MOST_CUTS),
    ):
        if size > most:
            raise ConfigError(
                f"a plan is searched here for at most {most} {what}",
                got=str(size),
                fix="give fewer, or layers that stand for several; fleetpipe.plan(..) in Python "
                "has no such limit",
            )


def run_plan(arguments: argparse.Namespace) -> int:
    """Computes, writes and prints a plan; returns the exit code."""
    if arguments.cluster is None:
        extra("clusters.cluster_options").require_no_cluster(arguments, plans=True)
        profile = Profile.read(arguments.file)
    else:
        profile = extra("clusters.cluster_options").profile_of_fastest(arguments)
    _require_moderate(profile, arguments.ranks, arguments.micro_batches)
    made = plan(
        profile,
        arguments.ranks,
        arguments.micro_batches,
        arguments.memory_cap,
        arguments.search,
        arguments.optimizer_copies,
        *(arguments.ep_degree, arguments.sep_degree, arguments.cp_degree),
    )
    if arguments.output is not None:
        with using("--output", arguments.output, "a file that can be written"):
            made.write(arguments.output)
    if arguments.plot is not None:
        with using("--plot", arguments.plot, "a .png, .svg or .pdf file that can be written"):
            made.plot(arguments.plot)
    text = made.dumps() if arguments.format == "json" else f"{made}\n\n{made.explain()}\n"
    sys.stdout.write(text)
    return 0


def run_estimate(arguments: argparse.Namespace) -> int:
    """Prints the costs of each schedule on several numbers of ranks, or of layouts of a cluster."""
    if arguments.cluster is not None:
        sys.stdout.write(extra("clusters.cluster_options").estimate(arguments) + "\n")
        return 0
    extra("clusters.cluster_options").require_no_cluster(arguments)
    profile = Profile.read(arguments.file)
    for ranks in arguments.ranks or (1,):
        profile.require_cuts_for(ranks)
        _require_moderate(profile, ranks, arguments.micro_batches)
    copies = arguments.optimizer_copies
    rows = estimates(profile, arguments.ranks or (1, 2, 4, 8), arguments.micro_batches, copies)
    if arguments.format == "json":
        sys.stdout.write(json.dumps([one._asdict() for one in rows]) + "\n")
        return 0
    layers = profile.layers_and_loss
    alone = arguments.micro_batches * sum(layer.forward + layer.whole for layer in layers)
    sys.stdout.write(estimates_table(rows, alone) + "\n")
    return 0

"""The commands ``fleetpipe schedule`` and ``fleetpipe verify``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from fleetpipe.arguments import new_file, number, using
from fleetpipe.errors import ConfigError, printable
from fleetpipe.extras import extra
from fleetpipe.json_value import Source, parse
from fleetpipe.schedules import registry
from fleetpipe.schedules.api import Plan, Schedule
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.families import table
from fleetpipe.schedules.forms.terminal import render, summary
from fleetpipe.schedules.forms.trace import events_of, write_trace
from fleetpipe.schedules.placement import SHAPES
from fleetpipe.schedules.registry import build_verified
from fleetpipe.schedules.rows import in_slices
from fleetpipe.schedules.simulation import Timeline

#: A number with more digits than any number of a schedule has.
_TOO_MANY_DIGITS = re.compile(r"\d{19,}")
_TOKEN = re.compile(r"[FBIW](\d+)\.\d+")

#: The largest schedules that are built here: some seconds of work. ``build`` itself has no limit.
MOST_RANKS = 1024
MOST_FORWARDS = 600_000


def configure_schedule(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe schedule`` to its parser."""
    parser.add_argument("name", metavar="NAME", help=", ".join(registry.names()))
    parser.add_argument(
        "--ranks", type=int, required=True, metavar="P", help="ranks of the pipeline"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        required=True,
        metavar="M",
        help="micro-batches of a batch (accumulate_steps)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help="model parts on each rank; 2 by default for Interleaved1F1B, on a vee or wave, else 1",
    )
    parser.add_argument(
        "--groups",
        type=_list_of_sizes,
        metavar="G,G,..",
        help="of Interleaved1F1B: micro-batches that pass a chunk before the next one begins;"
        " of kFkB: forwards, and then backwards, in a row",
    )
    parser.add_argument(
        "--warmup-slack",
        type=int,
        metavar="N",
        help="of Interleaved1F1B: forwards to warm up with for each rank after this one, 1 or 2",
    )
    parser.add_argument(
        "--slices",
        type=int,
        metavar="K",
        help="of Seq1F1B: slices that the sequence of a micro-batch is cut into; 2 by default",
    )
    parser.add_argument(
        "--memory-cap",
        type=number,
        metavar="N",
        help="most that a rank may hold: forwards of a chunk, or bytes where --costs has bytes;"
        " a schedule that does not keep within it fails",
    )
    parser.add_argument(
        "--head",
        action="store_true",
        help="put a part of a vocabulary head on each rank, behind the stages: with p stages, stage"
        " p+r is the part of rank r, and stage 2p the loss",
    )
    _add_costs(parser)
    _add_output(parser)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fleetpipe schedule`` that are costs of actions."""
    costs = parser.add_argument_group(
        "costs", "of one action of one chunk; F = I = W = 1, B = I + W and no latency by default"
    )
    costs.add_argument("--costs", type=Path, metavar="FILE", help="JSON with costs per stage")
    costs.add_argument("--forward", type=number, metavar="F", help="a forward; 1 by default")
    costs.add_argument(
        "--input-grad", type=number, metavar="I", help="the gradient of the input; 1 by default"
    )
    costs.add_argument(
        "--weight-grad", type=number, metavar="W", help="the gradient of the weights; 1 by default"
    )
    costs.add_argument(
        "--backward", type=number, metavar="B", help="in place of I and W, which are half of it"
    )
    costs.add_argument("--comm", type=number, metavar="C", help="latency between ranks")
    costs.add_argument(
        "--exchange",
        type=number,
        metavar="X",
        help="the part of F, and of B, in which ranks of a stage wait for each other's tokens: in a"
        " fused pair it passes while the other one computes",
    )
    costs.add_argument(
        "--overlapped", type=number, metavar="FB", help="a fused pair of F and B; by default F + B"
    )
    costs.add_argument(
        "--input-grad-frees",
        type=number,
        metavar="X",
        help="share (0..1) of a forward's activations that I releases",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fleetpipe schedule`` that say what is printed, drawn and written."""
    parser.add_argument(
        "--format",
        choices=("text", "json", "actions"),
        default="text",
        help="draw it; figures and actions; or the text form that `fleetpipe verify` reads",
    )
    parser.add_argument(
        "--plot",
        type=new_file,
        metavar="FILE",
        help="draw it to a .png, .svg or .pdf (needs matplotlib)",
    )
    parser.add_argument(
        "--plot-window",
        type=_span_of_times,
        metavar="FROM:TO",
        help="draw what runs between two times: a part of a large schedule",
    )
    parser.add_argument(
        "--plot-memory", action="store_true", help="draw what each rank holds below the timeline"
    )
    parser.add_argument(
        "--trace",
        type=new_file,
        metavar="FILE",
        help="write Chrome trace events, for ui.perfetto.dev",
    )


def run_schedule(arguments: argparse.Namespace) -> int:
    """Builds, verifies, simulates and prints a schedule; returns the exit code."""
    costs = _costs_from_arguments(arguments)
    _check_size(arguments)
    schedule = build_verified(
        arguments.name,
        ranks=arguments.ranks,
        micro_batches=arguments.micro_batches,
        chunks=arguments.chunks,
        options={name: getattr(arguments, name) for name in ("groups", "warmup_slack", "slices")},
        memory_cap=arguments.memory_cap,
        costs=costs,
        head=arguments.head,
    )
    timeline = schedule.simulate(costs)
    if arguments.plot is not None:
        with using("--plot", arguments.plot, "a .png, .svg or .pdf file that can be written"):
            extra("pictures.picture").plot(
                timeline, arguments.plot, window=arguments.plot_window, memory=arguments.plot_memory
            )
    if arguments.trace is not None:
        with using("--trace", arguments.trace, "a file that can be written"):
            write_trace(arguments.trace, {"predicted": events_of(timeline)}, schedule.placement)
    if arguments.format == "actions":
        _print(str(schedule))
    elif arguments.format == "json":
        _print(json.dumps(as_json(timeline)))
    else:
        _print(f"{render(timeline)}\n\n{summary(timeline)}")
    return 0


def _check_size(arguments: argparse.Namespace) -> None:
    """Refuses a schedule that would take minutes to build."""
    name = registry.canonical_name(arguments.name)
    chunks = arguments.chunks or registry.default_chunks(name)
    slices = arguments.slices or table.slices_of(name, {})
    forwards = arguments.ranks * chunks * arguments.micro_batches * slices
    if arguments.ranks > MOST_RANKS or forwards > MOST_FORWARDS:
        raise ConfigError(
            "this schedule is too large to be built on the command line",
            expected=f"at most {MOST_RANKS} ranks and {MOST_FORWARDS} forwards"
            " (ranks x chunks x micro-batches)",
            got=f"{arguments.ranks} ranks, {forwards} forwards",
            fix="look at fewer micro-batches: a schedule repeats itself once it is under way",
        )


def as_json(timeline: Timeline) -> dict[str, object]:
    """Returns the figures and the actions of a timeline, as ``--format json`` prints them."""
    schedule = timeline.schedule
    figures: dict[str, object] = {
        "name": schedule.name,
        "ranks": schedule.placement.ranks,
        "micro_batches": schedule.micro_batches,
        "chunks": schedule.placement.chunks,
        **({"slices": schedule.slices} if schedule.slices > 1 else {}),
        "makespan": timeline.makespan,
        "span": timeline.span,
        "busy": timeline.busy,
        "bubble": timeline.bubble,
        "bubble_rate": timeline.bubble_rate,
        "peak_activations": timeline.peak_activations,
        "actions": [list(map(str, row)) for row in schedule.actions],
    }
    if timeline.peak_bytes is not None:
        figures["peak_bytes"] = timeline.peak_bytes
    return figures


def configure_verify(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe verify`` to its parser."""
    parser.add_argument("file", metavar="FILE", help="a schedule or plan; - reads standard input")
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="in place of what the header says; a schedule without a header needs it",
    )
    parser.add_argument(
        "--placement",
        choices=tuple(SHAPES),
        help="in place of what the header says; loop where there is none",
    )


def run_verify(arguments: argparse.Namespace) -> int:
    """Verifies the schedule or plan in a file and prints what it is; returns the exit code."""
    with using("FILE", arguments.file, "a schedule or plan, or - for standard input"):
        from_input = arguments.file == "-"
        text = sys.stdin.read() if from_input else Path(arguments.file).read_text(encoding="utf-8")
    value = _read_schedule_or_plan(text, arguments.micro_batches, arguments.placement)
    value.verify()
    kind, rows = ("plan", value.ops) if isinstance(value, Plan) else ("schedule", value.actions)
    _print(
        f"valid {kind}: {printable(value.name)}, {value.placement.ranks} ranks,"
        f" {value.micro_batches} micro-batches{in_slices(value.slices)},"
        f" chunks {value.placement.chunks} ({value.placement.name}),"
        f" {sum(map(len, rows))} entries"
    )
    return 0


def _read_schedule_or_plan(
    text: str, micro_batches: int | None, placement: str | None
) -> Schedule | Plan:
    """Reads a schedule or plan in its text form, or the schedule in a file of `fleetpipe plan`."""
    if text.lstrip().startswith("{"):
        fix = (
            "give what `fleetpipe schedule --format actions` prints, or a plan of `fleetpipe plan`"
        )
        source = Source("FILE: this is JSON, and no plan of `fleetpipe plan`", ConfigError, fix)
        text = parse(text, source)["schedule"].text()
    digits = _TOO_MANY_DIGITS.search(text)
    if digits:
        raise ConfigError(
            "FILE: a number has too many digits",
            where=f"line {text.count(chr(10), 0, digits.start()) + 1}",
            got=f"{digits[0][:20]} ..",
            fix="give a schedule or plan whose numbers count ranks, stages and micro-batches",
        )
    text = _complete_header(text, micro_batches, placement)
    return Plan.parse(text) if text.startswith("# fleetpipe-plan") else Schedule.parse(text)


def _complete_header(text: str, micro_batches: int | None, placement: str | None) -> str:
    """Returns a text form with the header that the options ask for.

    ``micro_batches`` and ``placement`` replace what the header says; None keeps that. The text of a
    schedule may lack its header.
    """
    header, line_break, rows = text.partition("\n")
    if not header.startswith("#"):
        if micro_batches is None:
            return text
        stages = 1 + max((int(stage) for stage in _TOKEN.findall(text)), default=0)
        ranks = len(text.rstrip().split("\n"))
        chunks = SHAPES[placement or "loop"].round_up(-(-stages // ranks))
        header = f"# fleetpipe-schedule 1 name=unnamed ranks={ranks} chunks={chunks}"
        header += f" micro_batches={micro_batches} placement={placement or 'loop'}"
        return f"{header}\n{text}"
    if micro_batches is not None:
        header = re.sub(r" micro_batches=\S+", f" micro_batches={micro_batches}", header)
    if placement is not None:
        header = re.sub(r" placement=\S+", f" placement={placement}", header)
    return header + line_break + rows


def _costs_from_arguments(arguments: argparse.Namespace) -> Costs:
    """Returns the costs in the file of ``--costs``, or the default ones, changed by options."""
    costs = Costs()
    if arguments.costs is not None:
        with using("--costs", arguments.costs, "a JSON file with costs per stage"):
            text = arguments.costs.read_text(encoding="utf-8")
        try:
            costs = Costs.from_json(text)
        except ConfigError as error:
            error.add_place(str(arguments.costs))
            raise
    options = vars(arguments)
    fields = [field.name for field in dataclasses.fields(Costs)]
    changes = {name: options[name] for name in fields if options.get(name) is not None}
    if "backward" in changes:
        if "input_grad" in changes or "weight_grad" in changes:
            raise ConfigError(
                "--backward is given together with a part of it",
                expected="--backward, or --input-grad and --weight-grad",
                fix="leave out --backward, or both of its parts",
            )
        changes["input_grad"] = changes["weight_grad"] = changes["backward"] / 2
    elif "input_grad" in changes or "weight_grad" in changes:
        changes["backward"] = None
    return dataclasses.replace(costs, **changes)


def _list_of_sizes(text: str) -> list[int]:
    """Reads the argument of ``--groups``: numbers with commas between them."""
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid list of numbers: {text!r}; say 6,4") from None


def _span_of_times(text: str) -> tuple[float, float]:
    """Reads the argument of ``--plot-window``: two times with a colon between them."""
    begin, _, end = text.partition(":")
    try:
        return float(begin), float(end)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid window: {text!r}; say 100:140") from None


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")

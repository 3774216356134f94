"""Predicts published throughputs with ``fleetpipe estimate --cluster``'s model, row by row.

Run ``python -m benchmarks.published.validate [TABLE ..]``. Each table has one constant, the FLOP/s
that a product sustains: it is set so that one row comes out, and that row counts for nothing. What
else describes a cluster is the data sheet's, 75 % of the memory's bandwidth and 90 % of a link's,
or is named with the table.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fleetpipe.contrib.clusters import Cluster, JobLayout, StepEstimate, TrainingJob, Transformer
from fleetpipe.profiling import Link

FOLDER = Path(__file__).resolve().parent
GB = 1e9

#: Schedules that papers name, by fleetpipe's names.
SCHEDULES = {
    "": "1F1B",
    "1F1B-I": "Interleaved1F1B",
    "1F1B-R": "1F1B",
    "ZB-1p": "ZBH1",
    "ZB-2p": "ZBH2",
    "ZB-V": "ZBV",
    "V-ZB": "ZBV",
    "V-Half": "VHalf",
    "V-Min": "VMin",
}

Row = dict[str, str]


def a100(inside: Link, between: Link) -> Cluster:
    """Hosts of eight A100 80GB: 312 TFLOP/s, 2.04 TB/s."""
    return Cluster(
        hosts=1024,
        devices=8,
        memory=80 * GB,
        memory_bandwidth=0.75 * 2.04e12,
        flops={"float16": ((1.0, 1e14),)},
        peak=312e12,
        inside=inside,
        between=between,
        overlapped_transfers=0.0,
    )


def h100() -> Cluster:
    """Hosts of eight H100: 989 TFLOP/s, 3.35 TB/s, 400 Gb/s for each; exchanges are hidden."""
    return Cluster(
        hosts=2048,
        devices=8,
        memory=80 * GB,
        memory_bandwidth=0.75 * 3.35e12,
        flops={"bfloat16": ((1.0, 1e14),)},
        peak=989e12,
        inside=Link(5e-6, 1 / (0.9 * 450 * GB)),
        between=Link(1e-5, 1 / (0.9 * 50 * GB)),
        overlapped_gradients=1.0,
    )


#: NVLink of an A100, and of Selene and of vTrain's hosts eight and four links of 200 Gb/s.
NVLINK = Link(5e-6, 1 / (0.9 * 300 * GB))
SELENE = a100(NVLINK, Link(1e-5, 1 / (0.9 * 25 * GB)))
FOUR_LINKS = a100(NVLINK, Link(1e-5, 1 / (0.9 * 12.5 * GB)))
#: The line through the transfers that Zero Bubble's table 9 measures, over size.
PROFILED = Link(2.7e-4, 1 / (97 * GB))


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        name: What it is called here.
        file: The CSV that it is in.
        cluster: What it ran on, as far as that is known.
        calibrated: The place of the row, among its own, that the constant is taken from.
        wants: Which rows of the file it has.
        model: What the file does not say of the model.
        constants: What else was measured there, besides the one constant.
    """

    name: str
    file: str
    cluster: Cluster
    calibrated: int
    wants: Callable[[Row], bool]
    model: dict[str, object] = field(default_factory=dict)
    constants: str = ""


class Prediction(NamedTuple):
    """A row, and what is predicted.

    Attributes:
        row: Of the CSV.
        published: Its figure.
        predicted: In the same unit.
        estimate: From which it is.
        calibrated: Whether the constant is from this row.
    """

    row: Row
    published: float
    predicted: float
    estimate: StepEstimate
    calibrated: bool

    @property
    def error(self) -> float:
        """Of the prediction, in shares."""
        return self.predicted / self.published - 1


GPT = {"flash": False, "dtype": "float16"}

TABLES = (
    Table("megatron", "megatron_sc21", SELENE, 4, lambda row: not row["sharding"], GPT),
    Table("recompute", "activation_recompute", SELENE, 3, lambda _: True, GPT),
    Table(
        "zero-bubble",
        "zero_bubble",
        a100(PROFILED, PROFILED),
        18,
        lambda _: True,
        {**GPT, "vocabulary": 32_000},
        "a transfer's 0.27 ms and 97 GB/s, from table 9; a vocabulary of 32,000, from sizes",
    ),
    Table(
        "controllable-memory",
        "controllable_memory",
        a100(PROFILED, PROFILED),
        2,
        lambda row: row["unit"] == "mfu",
        {**GPT, "vocabulary": 32_000, "sequence": 1024},
        "transfers and vocabulary as in zero-bubble; a sequence of 1,024, from its figures",
    ),
    Table("llama3", "llama3", h100(), 0, lambda _: True, {"gated": True}),
    Table("vtrain", "vtrain", FOUR_LINKS, 83, lambda _: True, {**GPT, "vocabulary": 51_200}),
    Table("zero3", "megatron_sc21", SELENE, 0, lambda row: bool(row["sharding"]), GPT),
)


def rows(file: str) -> list[Row]:
    """Returns the rows of a CSV, its comments left out."""
    lines = (FOLDER / f"{file}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def transformer(row: Row, given: dict[str, object]) -> Transformer:
    """Returns the model of a row."""
    names = ("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary", "sequence")
    figures = {name: int(row[name]) for name in names if row[name]}
    return Transformer(**{**given, **figures})  # type: ignore[arg-type]


def layouts(row: Row, model: Transformer) -> Iterator[JobLayout]:
    """Yields the layout of a row; where sizes of micro-batches and chunks are not said, several."""
    parts = int(row["pp"])
    sharding = int(row["sharding"] or 1)
    chunks = [int(row["chunks"])] if row["chunks"] else range(1, 9 if parts > 1 else 2)
    for count in chunks:
        if not row["chunks"] and -(-model.layers // (parts * count)) * (parts * count) - (
            model.layers
        ) not in (0, 2):
            continue
        name = SCHEDULES.get(row["schedule"], row["schedule"])
        for micro_batch in [int(row["micro_batch"])] if row["micro_batch"] else (1, 2, 4, 8):
            yield JobLayout(
                pipeline=parts,
                tensor=int(row["tp"]),
                data=int(row["dp"]),
                sharding=sharding,
                context=int(row["cp"]),
                schedule="Interleaved1F1B" if name == "1F1B" and count > 1 else name,
                chunks=count,
                micro_batch=micro_batch,
                recompute=row["recompute"],
                sharding_stage=3 if sharding > 1 and parts == 1 else 1,
                sequence_parallel=row["recompute"] != "full",
            )


def predict(row: Row, table: Table, cluster: Cluster) -> tuple[float, StepEstimate]:
    """Returns the predicted figure of a row, in its unit, and the estimate that it is from.

    What the row does not say is chosen as ``estimate`` chooses: the fastest that fits.
    """
    model = transformer(row, table.model)
    batch, devices = int(row["global_batch"]), int(row["devices"])
    job = TrainingJob(model, cluster, batch)
    several = [one for one in map(job.estimate, layouts(row, model)) if one is not None]
    fitting = [one for one in several if one.peak <= cluster.memory] or several
    best = min(fitting, key=lambda one: one.seconds)
    seconds = best.seconds
    if (
        row["schedule"] == "ZB-2p"
        and row["table"] != "10"
        and best.micro_batches >= 2 * int(row["pp"])
    ):
        # Searched, and without a synchronised step: no rank waits. fleetpipe has no such schedule.
        seconds -= best.bubble
    forward = batch * model.forward_flops() / seconds / devices
    by_unit = {
        "seconds": seconds,
        "samples": batch / devices / seconds,
        "tflops": (4 if row["recompute"] == "full" else 3) * forward / 1e12,
        "mfu": 300 * forward / cluster.peak,
    }
    return by_unit[row["unit"]], best


def calibrated(table: Table, row: Row) -> Cluster:
    """Returns the table's cluster with the FLOP/s with which a row comes out, by halving."""
    low, high = 0.1, 100.0
    slower = row["unit"] == "seconds"
    for _ in range(40):
        middle = (low * high) ** 0.5
        value, _ = predict(row, table, table.cluster.with_flops(middle))
        if (value < float(row["value"])) != slower:
            low = middle
        else:
            high = middle
    return table.cluster.with_flops(high)


def predictions(table: Table) -> tuple[Cluster, list[Prediction]]:
    """Returns the calibrated cluster, and all rows of a table with what is predicted."""
    wanted = [row for row in rows(table.file) if table.wants(row)]
    cluster = calibrated(table, wanted[table.calibrated])
    made = []
    for place, row in enumerate(wanted):
        value, estimate = predict(row, table, cluster)
        made.append(
            Prediction(row, float(row["value"]), value, estimate, place == table.calibrated)
        )
    return cluster, made


class Summary(NamedTuple):
    """How good the predictions of a table are, the calibrated row left out.

    Attributes:
        rows: Predicted rows.
        median: Of the absolute errors, in percent.
        worst: Of them, in percent.
        pairs: Pairs of schedules of one model, batch and devices whose figures differ.
        ranked: Those whose faster one is predicted to be faster.
    """

    rows: int
    median: float
    worst: float
    pairs: int
    ranked: int


def summary(made: list[Prediction]) -> Summary:
    """Returns how good predictions are."""
    errors = [abs(one.error) for one in made if not one.calibrated]
    pairs = ranked = 0
    for first, second in combinations(made, 2):
        alike = ("table", "model", "devices", "global_batch", "recompute", "unit")
        same = all(first.row[name] == second.row[name] for name in alike)
        differ = first.row["schedule"] != second.row["schedule"]
        if same and differ and first.published != second.published:
            pairs += 1
            ranked += (first.published > second.published) == (first.predicted > second.predicted)
    return Summary(len(errors), 100 * median(errors), 100 * max(errors), pairs, ranked)


def shown(table: Table, cluster: Cluster, made: list[Prediction]) -> Iterator[str]:
    """Yields lines: each row, then the constants and the summary."""
    for one in made:
        layout = one.estimate.layout
        yield (
            f"{table.name:20s} {one.row['table']:>5s} {one.row['model']:>7s}"
            f" {one.row['devices']:>5s} devices  {layout!s:16s}"
            f" {one.row['schedule'] or layout.schedule:16s}"
            f" v{layout.chunks} b{layout.micro_batch} m{one.estimate.micro_batches:<5d}"
            f" {one.row['unit']:8s} {one.published:8.2f} {one.predicted:8.2f}"
            + ("  calibrated" if one.calibrated else f" {100 * one.error:+6.1f} %")
        )
    speeds = ", ".join(f"{curve[0][1] / 1e12:.0f} TFLOP/s" for curve in cluster.flops.values())
    good = summary(made)
    also = f"; {table.constants}" if table.constants else ""
    yield (
        f"{table.name}: {good.rows} rows, median error {good.median:.1f} %, worst"
        f" {good.worst:.1f} %; {good.ranked} of {good.pairs} pairs in order;"
        f" constants: {speeds}, from one row{also}"
    )


def main() -> None:
    """Prints the tables named, or all."""
    names = sys.argv[1:] or [table.name for table in TABLES]
    for table in TABLES:
        if table.name in names:
            print("\n".join(shown(table, *predictions(table))), flush=True)


if __name__ == "__main__":
    main()

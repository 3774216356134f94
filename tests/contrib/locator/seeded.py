"""Bugs that are put into right programs, and the place that ``locate`` has to name for each.

    python -m tests.contrib.locator.seeded [NAME ..]

A bug is a patch within which the job runs; the twin runs without. Some follow reports: piper#13,
SkyRL#1886, slapo#10, LongLive#71, Megatron-Bridge#5411, ipex-llm#2079, accelerate#1398,
torchtune#2420, nanoGPT#206, Megatron-LM#656 and #844.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from paddle import distributed, nn

from fleetpipe.dygraph import sequences
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    PipelineLayer,
    RowParallelLinear,
)
from tests import byhand
from tests.contrib.locator import right_layers, right_programs
from tests.contrib.locator.right_programs import WIDTH, Program, named, recorded

BASE = Program([])
#: One whose blocks have attention.
PLACED = BASE._replace(attends=True)
LOOP = BASE._replace(loop=True, wrapped=False, optimizer="Momentum")
TIED = BASE._replace(tied=True)
MEMBERS = LOOP._replace(wrapped=True)


def _instead(holder: Any, name: str, replacement: Callable[..., Any]) -> Any:
    """Patches a function by one that gets it first."""
    original = getattr(holder, name)
    return patch.object(holder, name, lambda *args, **named: replacement(original, *args, **named))


def _is_last() -> bool:
    return distributed.get_rank() == distributed.get_world_size() - 1


def _on_last(change: Callable[[list[Any]], object]) -> Callable[[], Any]:
    """Changes parameters on the last rank, before it makes its optimizer."""

    def optimizer_of(original: Any, program: Program, parameters: Any) -> Any:
        parameters = list(parameters)
        if _is_last():
            change(parameters)
        return original(program, parameters)

    return lambda: _instead(right_programs, "optimizer_of", optimizer_of)


def _on_last_rank(**options: Any) -> Callable[[], Any]:
    """Gives the optimizer of the last rank other options."""

    def optimizer_of(original: Any, program: Program, parameters: Any) -> Any:
        return original(program._replace(**options) if _is_last() else program, parameters)

    return lambda: _instead(right_programs, "optimizer_of", optimizer_of)


def _of_batch(change: Callable[..., Any]) -> Any:
    return _instead(right_programs, "batch", lambda original, *args: change(*original(*args)))


def _frozen(original: Any, layer: Any, x: Any) -> Any:
    if distributed.get_rank():
        layer.eval()
    return original(layer, x)


def _twice(shape: list[int]) -> Callable[[list[Any]], object]:
    """Doubles the gradient of the last parameter of a shape."""
    return lambda parameters: next(
        p for p in reversed(parameters) if p.shape == shape
    ).register_hook(lambda gradient: gradient * 2)


def _reduction(change: Callable[[Any], object], **options: Any) -> Any:
    def average(original: Any, gradient: Any, copies: int) -> Any:
        change(gradient)
        return original(gradient, copies, **options)

    return _instead(right_programs, "average", average)


def _unsynchronized_router() -> Any:
    def optimizer_of(original: Any, program: Program, parameters: Any) -> Any:
        for parameter in parameters:
            if parameter.shape == [WIDTH, right_layers.EXPERTS]:
                parameter.no_sync, parameter.is_distributed = True, False
        return original(program, parameters)

    return _instead(right_programs, "optimizer_of", optimizer_of)


class Bug(NamedTuple):
    """A bug and what is to be named.

    Attributes:
        axes: What is split in two.
        patch: Makes what the job runs in.
        layer: Its path.
        phase: Where a step first differs; "" for a right program, of which nothing is named.
        axis: Along which.
        program: What is trained.
    """

    axes: list[str]
    patch: Callable[[], Any]
    layer: str
    phase: str
    axis: str
    program: Program


def _local_attention(_: Any, query: Any, key: Any, value: Any, causal: bool) -> Any:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def _attends(attention: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: _instead(sequences, "attention", attention)


def _in_order(_: Any, value: Any) -> Any:
    """Contiguous places, where those of a ring are two stretches."""
    if isinstance(value, (list, tuple)):
        return type(value)(_in_order(None, part) for part in value)
    return value.split(2, axis=1)[distributed.get_rank()]


class _Slice:
    """Takes this rank's part of what all have, whose gradient is then of that part alone."""

    @staticmethod
    def apply(x: Any) -> Any:
        return x.split(2)[distributed.get_rank()]


def _shuffled(ids: Any, labels: Any) -> list[Any]:
    return [ids, labels.flip(0) if distributed.get_rank() else labels]


def _halved(gradient: Any) -> None:
    gradient.set_value(gradient.astype("bfloat16").astype("float32"))


def _local(kind: Any) -> Any:
    """Computes a product of shards without any collective."""

    def forward(layer: Any, x: Any) -> Any:
        return nn.functional.linear(x, layer.weight, layer.bias)

    return patch.object(kind, "forward", forward)


def _scaled_loss(factor: float) -> Any:
    return _instead(right_programs.Loss, "forward", lambda f, *args: f(*args) * factor)


def _other_layers(change: Callable[[list[Any]], object]) -> Any:
    def descriptions(original: Any, program: Program) -> list[Any]:
        made: list[Any] = original(program)
        change(made)
        return made

    return _instead(right_programs, "descriptions", descriptions)


def _change_first(parameters: list[Any]) -> None:
    parameters[0].set_value(parameters[0] * 1.5)


PARTS = PLACED._replace(in_parts=True)
ROUTED = PLACED._replace(mixture=True)
parts: Any = right_layers.parts
EP = ["sharding", "ep"]
# fmt: off
BUGS = {
    name: Bug(axes, patched, *place, program)
    for name, axes, patched, place, program in (
        ("labels-shuffled", ["pp"], lambda: _of_batch(_shuffled), ("", "data", "pp"), BASE),
        ("no-clip", ["dp"], _on_last_rank(clip=0.0), ("", "clip", "dp"), LOOP),
        ("doubled", ["dp"], _on_last(_twice([16, 8])), ("3.down", "gradient", ""), BASE),
        ("left-out", ["pp"], _on_last(list.pop), ("4", "optimizer input", ""), BASE),
        ("changed", ["dp"], _on_last(_change_first), ("0", "initial", "dp"), LOOP),
        ("statistics-frozen", ["dp"], lambda: _instead(nn.BatchNorm1D, "forward", _frozen),
         ("1.norm", "forward", "dp"), BASE._replace(norm="BatchNorm1D")),
        ("largest-of-ranks", ["dp"], lambda: _reduction(id, op=distributed.ReduceOp.MAX),
         ("4", "reduction", "dp"), LOOP),
        ("half-precision", ["dp"], lambda: _reduction(_halved), ("4", "reduction", "dp"), LOOP),
        ("local-attention", ["sep"], _attends(_local_attention), ("1", "forward", "sep"), PLACED),
        ("local-attention of cp", ["cp"], _attends(_local_attention),
         ("1", "forward", "cp"), PLACED),
        ("not-causal", ["cp"], _attends(lambda f, *args, causal: f(*args, causal=not causal)),
         ("1", "forward", "cp"), PLACED),
        ("parts-in-order", ["cp"], lambda: _instead(sequences, "own_part", _in_order),
         ("1", "forward", "cp"), PLACED),
        ("positions-from-zero", ["sep"],
         lambda: _of_batch(lambda x, y: [(x[0], x[1] - x[1].min()), y]),
         ("0.positions", "forward", "sep"), PLACED),
        ("labels-within-part", ["sep"], lambda: _of_batch(lambda x, _: [x, x[0].roll(-1, 1)]),
         ("", "data", "sep"), PLACED),
        ("norm-of-parts", ["mp"],
         lambda: patch.object(parts, "mark_as_sequence_parallel_parameter", id),
         ("3.after", "reduction", "mp"), PARTS),
        ("gathered-as-sum", ["mp"], lambda: patch.object(parts, "GatherOp", parts.AllGatherOp),
         ("4", "gradient", "mp"), PARTS),
        ("slice-for-scatter", ["mp"], lambda: patch.object(parts, "ScatterOp", _Slice),
         ("0.tokens", "reduction", "mp"), PARTS),
        ("router-not-reduced", EP, _unsynchronized_router,
         ("3.inner.router", "reduction", "sharding"), ROUTED),
        ("no-tied-reduction", ["pp"],
         lambda: patch.object(PipelineLayer, "allreduce_shared_weight_gradients", lambda _: None),
         ("shared_layers.table", "reduction", "pp"), TIED),
        ("tied-twice", ["pp"], _on_last(_twice([19, 8])),
         ("shared_layers.table", "gradient", "pp"), TIED),
        ("column-backward-not-reduced", ["mp"], lambda: _local(ColumnParallelLinear),
         ("3.up", "gradient", "mp"), MEMBERS),
        ("row-not-reduced", ["mp"], lambda: _local(RowParallelLinear),
         ("1.down", "forward", "mp"), MEMBERS),
        ("local-norm", ["mp"],
         lambda: patch.object(right_programs.fleet, "distributed_optimizer", lambda made: made),
         ("0", "clip", "mp"), MEMBERS),
        ("same-data", ["dp"], lambda: patch.object(right_programs, "_replica", lambda: 0),
         ("", "data", "dp"), LOOP),
        ("layer-missing", ["pp"], lambda: _other_layers(lambda made: made.pop(-2)),
         ("3.norm", "initial", ""), BASE),
        ("loss-scaled", ["dp"], lambda: _scaled_loss(2), ("", "loss", "dp"), BASE),
        ("activation", ["pp"], lambda: patch.object(nn.functional, "gelu", nn.functional.relu),
         ("1", "forward", ""), BASE),
        ("rate-by-rank", ["dp"], _on_last_rank(scheduled=True),
         ("", "optimizer input", "dp"), LOOP),
        ("summed-not-averaged", ["dp"],
         lambda: patch.object(right_programs, "average", lambda g, _: distributed.all_reduce(g)),
         ("4", "reduction", "dp"), LOOP),
        ("nothing", ["dp"], nullcontext, ("", "", ""), LOOP._replace(dropout=0.3)),
        ("nothing-of-parts", ["mp"], nullcontext, ("", "", ""), PARTS._replace(dropout=0.3)),
        ("nothing-tied", ["pp"], nullcontext, ("", "", ""), TIED),
        ("expert-twice", EP, _on_last(_twice([8, 8])),
         ("3.inner.mixture.experts.3.2", "gradient", ""), ROUTED),
    )
}
# fmt: on


def run_jobs(folder: str, names: list[str]) -> None:
    """What each of the ranks does."""
    for name in names:
        bug = BUGS[name]
        with bug.patch():
            program = bug.program._replace(axes=bug.axes)
            recorded(program, Path(folder, name, "job"), distributed.get_rank())


def wrong(names: list[str], folder: Path) -> list[str]:
    """Seeds bugs, prints the place that is named for each, and returns those with a wrong one."""
    byhand.call(run_jobs, 2, str(folder), names, folder=folder, timeout=600.0)
    found = []
    for name in names:
        bug = BUGS[name]
        place = named(bug.program._replace(axes=bug.axes), folder / name)
        given = (place.layer, place.phase, place.axis) if place else ("", "", "")
        expected = bug.layer, bug.phase, bug.axis
        print(f"{name}: {given}, expected {expected}", flush=True)
        found += [name] * (given != expected)
    return found


if __name__ == "__main__":
    # Ranks import what they call from here.
    from tests.contrib.locator.seeded import wrong as by_name

    with tempfile.TemporaryDirectory() as home:
        chosen = sys.argv[1:] or [*BUGS]
        failed = by_name(chosen, Path(home))
    sys.exit(f"wrong: {failed}" if failed else 0)

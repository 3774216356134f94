"""Borders of stages in a capture: how a user's ``split_spec`` names them, and what crosses them.

Start with :func:`borders_of`. A border is named by the call of a sublayer or of ``pipe_split``, so
that it is found again in a run with other shapes or in evaluation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from fleetpipe.aliases import Layer
from fleetpipe.capture.running.replay import name_of
from fleetpipe.capture.tracing.value import Capture, Scope, ValueId
from fleetpipe.errors import CaptureError, ConfigError, nearest, require_whole
from fleetpipe.partition import uniform
from fleetpipe.schedules import Edge

__all__ = [
    "AUTO",
    "SplitSpec",
    "borders_of",
]

#: The ``split_spec`` that chooses the cut by the costs of the nodes.
AUTO = "auto"


class SplitPoint(Enum):
    """The side of a sublayer on which a stage begins.

    Attributes:
        BEGINNING: The stage begins before the sublayer.
        END: The stage begins after the sublayer.
    """

    BEGINNING = "before"
    END = "after"


def nearest_path(path: str, paths: Collection[str]) -> str:
    """Returns a phrase that names the paths nearest to ``path``, or all of the first level."""
    phrase = nearest(path, paths)
    if not phrase.startswith("known"):
        return phrase
    return nearest(path, {candidate.partition(".")[0] for candidate in paths})


class AtCall(NamedTuple):
    """A border before or after a call of a sublayer.

    Attributes:
        path: The sublayer's path in the model.
        point: Before or after.
        call: The number of the call, from 0.
    """

    path: str
    point: SplitPoint = SplitPoint.BEGINNING
    call: int = 0

    def __str__(self) -> str:
        return f"{self.point.value} {self.path}" + (f" (call {self.call + 1})" * (self.call > 0))

    def start(self, trace: Capture) -> int:
        """Returns the first node of the stage that begins here.

        Raises:
            ConfigError: The forward does not call the sublayer.
        """
        inside = trace.calls.get(Scope(self.path, self.call))
        if inside is None:
            paths = {scope.path for scope in trace.calls if scope.path}
            within = [
                f"{path} is not opened: {reason}"
                for path, reason in trace.unopened.items()
                if self.path.startswith(f"{path}.")
            ]
            raise ConfigError(
                f"split_spec cuts {self}, where the model's forward does not come",
                got=nearest_path(self.path, paths),
                cause=within[0]
                if within
                else "its forward is called by no other, or as self.block.forward(x), which is no "
                "call of the layer",
                fix="name a sublayer that fleetpipe.explain(model, example) shows",
            )
        first, last = inside
        return first if self.point is SplitPoint.BEGINNING else last + 1


class AtMark(NamedTuple):
    """A border at a call of :func:`pipe_split`, by its number."""

    number: int

    def __str__(self) -> str:
        return f"at call {self.number + 1} of pipe_split"

    def start(self, trace: Capture) -> int:
        """Returns the first node of the stage that begins here."""
        if self.number >= len(trace.marks):
            raise CaptureError(
                "the forward called pipe_split more often in its first run",
                expected=f"{self.number + 1} calls or more",
                got=f"{len(trace.marks)} calls",
                fix="call pipe_split in training and in evaluation, whatever the inputs are",
            )
        return trace.marks[self.number]


#: A place where a stage begins.
Border = AtCall | AtMark


def starts(trace: Capture, borders: Sequence[Border], example: Capture | None = None) -> list[int]:
    """Returns the first node of each stage after stage 0.

    Args:
        trace: A run of the forward.
        borders: The borders, in the order of the first run.
        example: The first run in the same mode. A run for another batch may leave out sublayers, as
            those for images: the others stay in their stages of the first run, and a stage may have
            no node.

    Raises:
        ConfigError: The forward does not reach a border, or a stage would be empty.
    """
    if example is not None:
        reached = [_start(trace, border, example) for border in borders]
        return list(accumulate(reached, max))
    numbers = [border.start(trace) for border in borders]
    for border, start, after in zip(borders, numbers, [*numbers[1:], len(trace.nodes)]):
        if not 0 < start < after:
            raise ConfigError(
                f"the cut {border} leaves a stage without a node",
                got=f"stages that begin at the nodes {[0, *numbers]} of {len(trace.nodes)}",
                cause="two places are the same, or nothing runs before the first or after the last",
                fix="cut elsewhere: fleetpipe.explain(model, example) shows the nodes in order",
            )
    return numbers


def _start(trace: Capture, border: Border, example: Capture) -> int:
    """Returns the first node after a border, in a run that may not reach the border itself."""
    if not isinstance(border, AtCall) or Scope(border.path, border.call) in trace.calls:
        return border.start(trace)
    first = border.start(example)
    for number, node in enumerate(trace.nodes):
        if any(example.calls.get(scope, (0,))[0] >= first for scope in node.scopes):
            return number
    return len(trace.nodes)


def in_order(trace: Capture, borders: Sequence[Border]) -> list[Border]:
    """Sorts borders as a run reaches them; raises the same errors as :func:`starts`."""
    return sorted(borders, key=lambda border: border.start(trace))


def crossing(
    trace: Capture, starts: Sequence[int], edges: Collection[Edge] = ()
) -> dict[Edge, tuple[str, ...]]:
    """Returns the names of the values on each edge; each value goes to every stage that uses it.

    Args:
        trace: The run.
        starts: The first node of each stage after stage 0; the model's inputs are in stage 0, its
            outputs in the last stage.
        edges: The edges of a pipeline that is built already. If none of them leads directly to a
            stage, the value takes several edges over other stages.
    """

    def stage_of(node: int | None) -> int:
        return 0 if node is None else bisect_right(starts, node)

    uses_of_stages = [(stage_of(number), node.uses) for number, node in enumerate(trace.nodes)]
    uses_of_stages.append((len(starts), set(trace.output_values)))
    values: dict[Edge, set[ValueId]] = {}
    for stage, uses in uses_of_stages:
        for value in uses:
            source = stage_of(trace.maker(value))
            for edge in _route(source, stage, edges) if source != stage else ():
                values.setdefault(edge, set()).add(value)
    return {edge: tuple(map(name_of, sorted(values[edge]))) for edge in sorted(values)}


def _route(source: int, stage: int, edges: Collection[Edge]) -> list[Edge]:
    """Returns the fewest edges that lead from a stage to a later one; a new one if none do."""
    routes = {source: list[Edge]()}
    for between in range(source, stage):
        for edge in edges if between in routes else ():
            if edge.source == between and edge.target <= stage:
                route = [*routes[between], edge]
                routes[edge.target] = min(routes.get(edge.target, route), route, key=len)
    return routes.get(stage, [Edge(source, stage)])


#: ``{name: SplitPoint}``, ``{name: stage}``, names, a prefix, or None for marks in the model.
SplitSpec = str | Sequence[str] | Mapping[str, SplitPoint] | Mapping[str, int] | None


def borders_of(spec: SplitSpec, model: Layer, trace: Capture, stages: int | None) -> list[Border]:
    """Returns the borders that a user's ``split_spec`` names, in the order of the run.

    Args:
        spec: Any ``split_spec`` except "auto".
        model: The model.
        trace: The run of its forward in training.
        stages: The number of stages, if it is known; a prefix needs it.

    Raises:
        ConfigError: ``spec`` names something that does not exist, or has an unknown form.
    """
    if isinstance(spec, str):
        return _evenly(spec, trace, stages)
    if spec is None:
        return _marked_in(model, trace)
    if not isinstance(spec, (Mapping, Sequence)):
        raise _unknown_form(spec)
    _require_names(spec, model)
    if isinstance(spec, Sequence):
        return in_order(trace, [AtCall(path) for path in spec])
    # The enumeration of Paddle's ``pp_config`` has the same names.
    points = {path: SplitPoint[p.name] for path, p in spec.items() if isinstance(p, Enum)}
    if len(points) == len(spec):
        return in_order(trace, [AtCall(path, point) for path, point in points.items()])
    return _of_stages(spec, trace)


def _unknown_form(spec: object) -> ConfigError:
    return ConfigError(
        "split_spec is of no form that is known",
        expected='"auto", a prefix, a list of names, {name: SplitPoint}, {name: stage} or None',
        got=repr(spec),
        fix='pass ["layer2", "layer3"], for stages that begin with these sublayers',
    )


def _require_names(names: Sequence[str] | Mapping[str, object], model: Layer) -> None:
    """Raises an error if a name is no sublayer of the model."""
    layers = dict(model.named_sublayers())
    if not all(isinstance(name, str) for name in names):
        raise _unknown_form(names)
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise ConfigError(
            f"split_spec names sublayers that {type(model).__name__} has not",
            got="; ".join(f"{name!r}, {nearest_path(name, layers)}" for name in unknown),
            fix="name sublayers as model.named_sublayers() does",
        )


def _evenly(prefix: str, trace: Capture, stages: int | None) -> list[Border]:
    """Shares the sublayers below a prefix evenly among the stages, in the order of their calls."""
    depth = prefix.count(".") + 2
    called = dict.fromkeys(scope.path for node in trace.nodes for scope in node.scopes)
    children = [
        path for path in called if path.startswith(f"{prefix}.") and len(path.split(".")) == depth
    ]
    if not children:
        paths = {path.rpartition(".")[0] for path in called}
        raise ConfigError(
            f"split_spec={prefix!r}: the forward calls no sublayer below that name",
            got=nearest_path(prefix, {AUTO, *paths} - {""}),
            fix='pass the name of a LayerList or Sequential, or "auto"',
        )
    if stages is None:
        raise ConfigError(
            f"split_spec={prefix!r} shares sublayers among stages, of which there is no number",
            fix="call fleet.init with a pp_degree first, or pass num_stages",
        )
    first = uniform(len(children), stages)[1:-1]
    return [AtCall(children[index]) for index in first]


def _marked_in(model: Layer, trace: Capture) -> list[Border]:
    """Returns the borders that the model marks by ``pipeline_stage`` or by ``pipe_split``."""
    stages = {
        path: layer.pipeline_stage
        for path, layer in model.named_sublayers()
        if hasattr(layer, "pipeline_stage")
    }
    if stages:
        return _of_stages(stages, trace)
    if not trace.marks:
        raise ConfigError(
            "split_spec=None, and the model says nothing of stages",
            expected="sublayers with a pipeline_stage, or calls of fleetpipe.pipe_split()",
            fix='pass split_spec="auto", or model.layer3.pipeline_stage = 1',
        )
    return [AtMark(number) for number in range(len(trace.marks))]


def _of_stages(stages: Mapping[str, object], trace: Capture) -> list[Border]:
    """Returns the borders for sublayers with a stage; others are in the stage of the one before.

    A stage applies to the first call of a sublayer; a second call is in the stage where it runs.
    """
    borders: list[Border] = []
    for node in trace.nodes:
        named = [scope for scope in node.scopes if scope.path in stages and not scope.call]
        if not named:
            continue
        path = named[-1].path
        rule = f"the stage of {path!r} is no number of a stage"
        fix = "give whole numbers from 0, in the order in which the sublayers run"
        stage = require_whole("stage", stages[path], 0, rule=rule, fix=fix)
        if stage == len(borders) + 1:
            borders.append(AtCall(path))
        elif stage != len(borders):
            raise ConfigError(
                f"{path!r} is in stage {stage}, and runs after a sublayer of stage {len(borders)}",
                where=node.place,
                expected=f"stage {len(borders)} or {len(borders) + 1}",
                got=f"stage {stage}",
                fix="number the stages from 0, in the order in which the sublayers run",
            )
    return borders

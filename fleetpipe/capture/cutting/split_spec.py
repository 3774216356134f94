"""Finds the borders between stages that a user's ``split_spec`` names, and what crosses them.

A border is the boundary between two consecutive stages in a capture: the node before which the
later stage begins. It is named by the call of a sublayer or of ``pipe_split``, so that it is found
again in a run with other shapes or in evaluation. Start with :func:`borders_of`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from fleetpipe.aliases import Layer
from fleetpipe.capture.running.replay import value_name
from fleetpipe.capture.tracing.value import Capture, Scope, ValueId
from fleetpipe.errors import CaptureError, ConfigError, nearest, require_whole
from fleetpipe.partition import uniform
from fleetpipe.schedules import Edge

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
    """Returns a phrase for an error that names the known paths nearest to a misspelt one.

    If none is near, the phrase names all first components of the known paths.
    """
    phrase = nearest(path, paths)
    if phrase.startswith("known"):
        return nearest(path, {known_path.partition(".")[0] for known_path in paths})
    return phrase


class AtCall(NamedTuple):
    """A border before or after a call of a sublayer.

    Attributes:
        path: The sublayer's path in the model.
        point: Whether the later stage begins before or after the call.
        call: The number of the call of this sublayer, from 0.
    """

    path: str
    point: SplitPoint = SplitPoint.BEGINNING
    call: int = 0

    def __str__(self) -> str:
        return f"{self.point.value} {self.path}" + (f" (call {self.call + 1})" * (self.call > 0))

    def start(self, trace: Capture) -> int:
        """Returns the number of the first node of the stage that begins at this border.

        Raises:
            ConfigError: The forward does not call the sublayer.
        """
        first_and_last = trace.calls.get(Scope(self.path, self.call))
        if first_and_last is None:
            paths = {scope.path for scope in trace.calls if scope.path}
            reasons = [
                f"{path} is not opened: {reason}"
                for path, reason in trace.unopened.items()
                if self.path.startswith(f"{path}.")
            ]
            raise ConfigError(
                f"split_spec cuts {self}, where the model's forward does not come",
                got=nearest_path(self.path, paths),
                cause=reasons[0]
                if reasons
                else "its forward is called by no other, or as self.block.forward(x), which is no "
                "call of the layer",
                fix="name a sublayer that fleetpipe.explain(model, example) shows",
            )
        first, last = first_and_last
        return first if self.point is SplitPoint.BEGINNING else last + 1


class AtMark(NamedTuple):
    """A border at a call of :func:`pipe_split`, by the number of the call, from 0."""

    number: int

    def __str__(self) -> str:
        return f"at call {self.number + 1} of pipe_split"

    def start(self, trace: Capture) -> int:
        """Returns the number of the first node of the stage that begins at this border.

        Raises:
            CaptureError: The forward calls ``pipe_split`` less often.
        """
        if self.number >= len(trace.pipe_splits):
            raise CaptureError(
                "the forward called pipe_split more often in its first run",
                expected=f"{self.number + 1} calls or more",
                got=f"{len(trace.pipe_splits)} calls",
                fix="call pipe_split in training and in evaluation, whatever the inputs are",
            )
        return trace.pipe_splits[self.number]


#: The boundary between two stages: where the later one begins.
Border = AtCall | AtMark


def find_starts(
    trace: Capture, borders: Sequence[Border], example: Capture | None = None
) -> list[int]:
    """Returns the number of the first node of each stage after stage 0.

    Args:
        trace: A run of the forward.
        borders: The borders, in the order of the first run.
        example: The first run in the same mode; None if ``trace`` is the first one. A run for
            another batch may leave out sublayers, such as those for images: the others stay in
            their stages of the first run, and a stage may have no node.

    Raises:
        ConfigError: The forward does not reach a border, or a stage would be empty.
    """
    if example is not None:
        reached = [_start_in_run(trace, border, example) for border in borders]
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


def _start_in_run(trace: Capture, border: Border, example: Capture) -> int:
    """Returns the number of the first node after a border in ``trace``, which may not reach it.

    A run without images, for example, does not call the sublayers for images. ``example``, the
    first run in the same mode, reaches the border. If all nodes of ``trace`` are before the border,
    the result is their number.
    """
    if not isinstance(border, AtCall) or Scope(border.path, border.call) in trace.calls:
        return border.start(trace)
    first = border.start(example)
    for number, node in enumerate(trace.nodes):
        if any(example.calls.get(scope, (0,))[0] >= first for scope in node.scopes):
            return number
    return len(trace.nodes)


def values_on_edges(
    trace: Capture, starts: Sequence[int], edges: Collection[Edge] = ()
) -> dict[Edge, tuple[str, ...]]:
    """Returns the names of the values on each edge between two stages.

    A value goes from the stage that makes it to every other stage that uses it.

    Args:
        trace: A run of the forward.
        starts: The number of the first node of each stage after stage 0; the model's inputs are in
            stage 0, its outputs in the last stage.
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
            if source == stage:
                continue
            for edge in _shortest_route(source, stage, edges):
                values.setdefault(edge, set()).add(value)
    return {edge: tuple(map(value_name, sorted(values[edge]))) for edge in sorted(values)}


def _shortest_route(source: int, stage: int, edges: Collection[Edge]) -> list[Edge]:
    """Returns the fewest of the edges that lead from ``source`` to a later stage, in order.

    If no edges lead there, the route is a new edge between the two.
    """
    routes = {source: list[Edge]()}
    for reached in range(source, stage):
        if reached not in routes:
            continue
        for edge in edges:
            if edge.source == reached and edge.target <= stage:
                route = [*routes[reached], edge]
                routes[edge.target] = min(routes.get(edge.target, route), route, key=len)
    return routes.get(stage, [Edge(source, stage)])


#: How a user names the cut: ``{name: SplitPoint}``, ``{name: stage}``, names of sublayers, the
#: prefix of names, "auto", or None if the model says it by ``pipeline_stage`` or ``pipe_split``.
SplitSpec = str | Sequence[str] | Mapping[str, SplitPoint] | Mapping[str, int] | None


def borders_of(spec: SplitSpec, model: Layer, trace: Capture, stages: int | None) -> list[Border]:
    """Returns the borders that a user's ``split_spec`` names, in the order of the run.

    Args:
        spec: Any ``split_spec`` except "auto".
        model: The model.
        trace: The run of its forward in training.
        stages: The number of stages; None if it is unknown. A prefix needs it.

    Raises:
        ConfigError: ``spec`` names something that does not exist, or has an unknown form.
    """
    if isinstance(spec, str):
        return _split_evenly(spec, trace, stages)
    if spec is None:
        return _marked_borders(model, trace)
    if not isinstance(spec, (Mapping, Sequence)):
        raise _unknown_spec_error(spec)
    _require_names(spec, model)
    borders = [AtCall(path) for path in spec]
    if isinstance(spec, Mapping):
        # The enumeration of Paddle's ``pp_config`` has the same names.
        borders = [AtCall(n, SplitPoint[p.name]) for n, p in spec.items() if isinstance(p, Enum)]
        if len(borders) < len(spec):
            return _borders_of_stages(spec, trace)
    return sorted(borders, key=lambda border: border.start(trace))


def _unknown_spec_error(spec: object) -> ConfigError:
    """Returns the error for a ``split_spec`` of an unknown type."""
    return ConfigError(
        "split_spec is of no form that is known",
        expected='"auto", a prefix, a list of names, {name: SplitPoint}, {name: stage} or None',
        got=repr(spec),
        fix='pass ["layer2", "layer3"], for stages that begin with these sublayers',
    )


def _require_names(names: Sequence[str] | Mapping[str, object], model: Layer) -> None:
    """Raises a ConfigError if a name is no text, or not the name of a sublayer of the model."""
    layers = dict(model.named_sublayers())
    if not all(isinstance(name, str) for name in names):
        raise _unknown_spec_error(names)
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise ConfigError(
            f"split_spec names sublayers that {type(model).__name__} has not",
            got="; ".join(f"{name!r}, {nearest_path(name, layers)}" for name in unknown),
            fix="name sublayers as model.named_sublayers() does",
        )


def _split_evenly(prefix: str, trace: Capture, stages: int | None) -> list[Border]:
    """Returns borders that share the sublayers below a prefix evenly among the stages.

    The sublayers are in the order of their first calls.

    Raises:
        ConfigError: No sublayer below the prefix is called, or the number of stages is unknown.
    """
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
    boundaries = uniform(len(children), stages)[1:-1]
    return [AtCall(children[index]) for index in boundaries]


def _marked_borders(model: Layer, trace: Capture) -> list[Border]:
    """Returns the borders that the model itself marks, by ``pipeline_stage`` or ``pipe_split``.

    Raises:
        ConfigError: The model marks none.
    """
    stages = {
        path: layer.pipeline_stage
        for path, layer in model.named_sublayers()
        if hasattr(layer, "pipeline_stage")
    }
    if stages:
        return _borders_of_stages(stages, trace)
    if not trace.pipe_splits:
        raise ConfigError(
            "split_spec=None, and the model says nothing of stages",
            expected="sublayers with a pipeline_stage, or calls of fleetpipe.pipe_split()",
            fix='pass split_spec="auto", or model.layer3.pipeline_stage = 1',
        )
    return [AtMark(number) for number in range(len(trace.pipe_splits))]


def _borders_of_stages(stages: Mapping[str, object], trace: Capture) -> list[Border]:
    """Returns the borders for sublayers whose stage is given: its number, by the sublayer's path.

    The stage applies to the first call of a sublayer. Any other call is in the stage of the call
    before it.

    Raises:
        ConfigError: A stage is no number, or the numbers do not increase in the order of the calls.
    """
    borders: list[Border] = []
    for node in trace.nodes:
        first_calls = [scope for scope in node.scopes if scope.path in stages and not scope.call]
        if not first_calls:
            continue
        path = first_calls[-1].path
        rule = f"the stage of {path!r} is no number of a stage"
        fix = "give whole numbers from 0, in the order in which the sublayers run"
        stage = require_whole("stage", stages[path], 0, rule=rule, fix=fix)
        if stage == len(borders) + 1:
            borders.append(AtCall(path))
        elif stage != len(borders):
            raise ConfigError(
                f"{path!r} is in stage {stage}, and runs after a sublayer of stage {len(borders)}",
                where=node.location,
                expected=f"stage {len(borders)} or {len(borders) + 1}",
                got=f"stage {stage}",
                fix="number the stages from 0, in the order in which the sublayers run",
            )
    return borders

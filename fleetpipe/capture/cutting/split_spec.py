"""The forms of a user's ``split_spec``, and the borders that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from fleetpipe.aliases import Layer
from fleetpipe.capture.cutting import cuts
from fleetpipe.capture.tracing.value import Capture
from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.partition import uniform

#: ``{name: SplitPoint}``, ``{name: stage}``, names, a prefix, or None for what the model says.
SplitSpec = str | Sequence[str] | Mapping[str, cuts.SplitPoint] | Mapping[str, int] | None

#: Has the cut chosen by what the nodes cost.
AUTO = "auto"


def borders_of(
    spec: SplitSpec, model: Layer, trace: Capture, stages: int | None
) -> list[cuts.Border]:
    """Returns the borders that a user's ``split_spec`` means, in the order of the run.

    Args:
        spec: Anything but "auto".
        model: The model.
        trace: The run of its forward in training.
        stages: The number of stages, if it is known; a prefix needs it.

    Raises:
        ConfigError: It names something that does not exist, or has an unknown form.
    """
    if isinstance(spec, str):
        return _evenly(spec, trace, stages)
    if spec is None:
        return _said_by(model, trace)
    if not isinstance(spec, (Mapping, Sequence)):
        raise _unknown_form(spec)
    _require_names(spec, model)
    if isinstance(spec, Sequence):
        return cuts.in_order(trace, [cuts.AtCall(path) for path in spec])
    # Paddle's own, of ``pp_config``, have these names too.
    points = {path: cuts.SplitPoint[p.name] for path, p in spec.items() if isinstance(p, Enum)}
    if len(points) == len(spec):
        return cuts.in_order(trace, [cuts.AtCall(path, point) for path, point in points.items()])
    return _of_stages(spec, trace)


def _unknown_form(spec: object) -> ConfigError:
    return ConfigError(
        "split_spec is of no form that is known",
        expected='"auto", a prefix, a list of names, {name: SplitPoint}, {name: stage} or None',
        got=repr(spec),
        fix='pass ["layer2", "layer3"], for stages that begin with these sublayers',
    )


def _require_names(names: Sequence[str] | Mapping[str, object], model: Layer) -> None:
    layers = dict(model.named_sublayers())
    for name in names:
        if not isinstance(name, str):
            raise _unknown_form(names)
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise ConfigError(
            f"split_spec names sublayers that {type(model).__name__} has not",
            got="; ".join(f"{name!r}, {cuts.nearest_path(name, layers)}" for name in unknown),
            fix="name sublayers as model.named_sublayers() does",
        )


def _evenly(prefix: str, trace: Capture, stages: int | None) -> list[cuts.Border]:
    """Shares the sublayers below a prefix evenly among the stages, in the order of their calls."""
    depth = prefix.count(".") + 2
    below: list[str] = []
    for node in trace.nodes:
        for scope in node.scopes:
            parts = scope.path.split(".")
            if scope.path.startswith(f"{prefix}.") and len(parts) == depth:
                below.append(scope.path)
    children = list(dict.fromkeys(below))
    if not children:
        paths = {scope.path.rpartition(".")[0] for node in trace.nodes for scope in node.scopes}
        raise ConfigError(
            f"split_spec={prefix!r}: the forward calls no sublayer below that name",
            got=cuts.nearest_path(prefix, {AUTO, *paths} - {""}),
            fix='pass the name of a LayerList or Sequential, or "auto"',
        )
    if stages is None:
        raise ConfigError(
            f"split_spec={prefix!r} shares sublayers among stages, of which there is no number",
            fix="call fleet.init with a pp_degree first, or pass num_stages",
        )
    first = uniform(len(children), stages)[1:-1]
    return [cuts.AtCall(children[index]) for index in first]


def _said_by(model: Layer, trace: Capture) -> list[cuts.Border]:
    """Returns the borders in the model: ``pipeline_stage`` of sublayers, or ``pipe_split``."""
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
    return [cuts.AtMark(number) for number in range(len(trace.marks))]


def _of_stages(stages: Mapping[str, object], trace: Capture) -> list[cuts.Border]:
    """Returns the borders for sublayers with a stage; the others join the sublayer before them.

    A stage applies to the first call of a sublayer; a second call is in the stage where it runs.
    """
    borders: list[cuts.Border] = []
    for node in trace.nodes:
        named = [scope for scope in node.scopes if scope.path in stages and not scope.call]
        if not named:
            continue
        path = named[-1].path
        rule = f"the stage of {path!r} is no number of a stage"
        fix = "give whole numbers from 0, in the order in which the sublayers run"
        stage = require_whole("stage", stages[path], 0, rule=rule, fix=fix)
        if stage == len(borders) + 1:
            borders.append(cuts.AtCall(path))
        elif stage != len(borders):
            raise ConfigError(
                f"{path!r} is in stage {stage}, and runs after a sublayer of stage {len(borders)}",
                where=node.place,
                expected=f"stage {len(borders)} or {len(borders) + 1}",
                got=f"stage {stage}",
                fix="number the stages from 0, in the order in which the sublayers run",
            )
    return borders


__all__ = ["AUTO", "SplitSpec", "borders_of"]

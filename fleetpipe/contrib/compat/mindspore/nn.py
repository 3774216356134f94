"""``nn``: the cells that a program wraps its network in, and the stages of sublayers.

A network is any Layer of Paddle's. ``Cell`` is a Layer whose forward is called ``construct``. Its
``pipeline_stage`` is checked when it is set; that of another Layer when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.contrib.compat.mindspore import context
from fleetpipe.errors import ConfigError, StateError, UsageError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import give_parameters_a_method
from fleetpipe.schedules import build
from fleetpipe.schedules.registry import default_chunks

#: The attribute with the stages that :func:`add_pipeline_stage` gave a parameter.
_STAGES_ATTRIBUTE = "pipeline_stages"


class Cell(paddle.nn.Layer):
    """A Layer whose methods have MindSpore's names."""

    def forward(self, *inputs: Nest, **named: Nest) -> Nest:
        """Calls ``construct``."""
        return self.construct(*inputs, **named)

    def construct(self, *inputs: Nest, **named: Nest) -> Nest:
        """Computes the output of the cell; a subclass defines it.

        Raises:
            UsageError: The subclass does not define it.
        """
        raise UsageError(
            f"{type(self).__name__} has no construct", fix="def construct(self, x): return .."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; checks ``pipeline_stage``, the stage of all that the cell contains.

        Raises:
            UsageError: ``pipeline_stage`` is no int.
            ConfigError: It is negative.
        """
        if name == "pipeline_stage":
            _require_stage(value, type(self).__name__)
        super().__setattr__(name, value)

    def trainable_params(self) -> list[Tensor]:
        """Returns the parameters that an optimizer updates."""
        return [parameter for parameter in self.parameters() if not parameter.stop_gradient]

    def infer_param_pipeline_stage(self) -> list[Tensor]:
        """See :func:`infer_param_pipeline_stage`."""
        return infer_param_pipeline_stage(self)


def Momentum(
    params: Sequence[Tensor],
    learning_rate: float,
    momentum: float,
    weight_decay: float = 0.0,
    use_nesterov: bool = False,
) -> Optimizer:
    """Returns Paddle's ``Momentum``, which takes its arguments in another order.

    Args:
        params: The parameters to update, such as from :func:`infer_param_pipeline_stage`.
        learning_rate: A rate, or a scheduler of Paddle's.
        momentum: The fraction of the last step that the next one includes.
        weight_decay: The fraction of a parameter that is added to its gradient.
        use_nesterov: Whether Nesterov's momentum is used.
    """
    return paddle.optimizer.Momentum(
        learning_rate, momentum, params, use_nesterov, weight_decay or None
    )


class WithLossCell(Cell):
    """A network and its loss."""

    def __init__(self, backbone: Layer, loss_fn: Callable[[Nest, Nest], Tensor]) -> None:
        """Takes a network and its loss.

        Args:
            backbone: The network.
            loss_fn: ``loss_fn(output, label)`` gives a Tensor with one element.

        Raises:
            UsageError: ``backbone`` is no Layer, or ``loss_fn`` cannot be called.
        """
        super().__init__()
        if not isinstance(backbone, paddle.nn.Layer):
            raise UsageError(
                "WithLossCell takes a network",
                got=type(backbone).__name__,
                fix="nn.WithLossCell(net, loss), with a Layer",
            )
        if not callable(loss_fn):
            raise UsageError(
                "the loss of WithLossCell cannot be called",
                got=type(loss_fn).__name__,
                fix="nn.WithLossCell(net, paddle.nn.CrossEntropyLoss())",
            )
        self.backbone_network = backbone
        self.loss_fn = loss_fn

    def construct(self, data: Nest, label: Nest) -> Tensor:
        """Returns the loss of some rows."""
        return self.loss_fn(self.backbone_network(data), label)


class PipelineCell(Cell):
    """Cuts a batch into micro-batches, and adds up their losses."""

    def __init__(self, network: WithLossCell, micro_size: int) -> None:
        """Takes a network with a loss.

        Args:
            network: The network and its loss.
            micro_size: The number of micro-batches, at least the number of stages.

        Raises:
            UsageError: ``network`` is no WithLossCell, or ``micro_size`` no int.
            ConfigError: ``micro_size`` is below 1, or below ``pipeline_stages``.
        """
        super().__init__()
        if not isinstance(network, WithLossCell):
            raise UsageError(
                "PipelineCell takes a network with its loss",
                got=type(network).__name__,
                fix="nn.PipelineCell(nn.WithLossCell(net, loss), micro_size)",
            )
        stages = context.options().pipeline_stages
        rule = (
            "micro_size is the number of micro-batches, and must be at least that of the stages "
            f"(={stages})"
        )
        fix = f"nn.PipelineCell(network, {max(stages, 2)}), or fewer stages"
        context.require_number("micro_size", micro_size, max(stages, 1), rule, fix)
        self.network = network
        self.micro_size = micro_size

    def construct(self, data: Tensor, label: Tensor) -> Tensor:
        """Runs the micro-batches one after another in one process; returns the sum of the losses.

        Raises:
            ConfigError: ``micro_size`` does not divide the rows.
        """
        rows = rows_of_micro_batch(data.shape[0], self.micro_size)
        total = None
        for start in range(0, data.shape[0], rows):
            loss = self.network(data[start : start + rows], label[start : start + rows])
            total = loss if total is None else total + loss
        return total


def rows_of_micro_batch(rows: int, micro_size: int) -> int:
    """Returns the rows of each of ``micro_size`` micro-batches.

    Raises:
        ConfigError: The number does not divide the rows.
    """
    if not rows or rows % micro_size:
        raise ConfigError(
            f"micro_size (={micro_size}) does not divide the {rows} rows of a batch",
            fix="choose a batch size that it divides, and drop an incomplete last batch",
        )
    return rows // micro_size


def add_pipeline_stage(parameter: Tensor, stage: int) -> None:
    """Declares that a parameter is used in ``stage`` too, besides the stage of its sublayer.

    ``parameter.add_pipeline_stage(stage)`` does the same. A parameter that two sublayers share,
    each with a stage, needs no such call.

    Args:
        parameter: The parameter.
        stage: The stage.

    Raises:
        UsageError: ``stage`` is no int.
        ConfigError: It is negative.
    """
    _require_stage(stage, parameter.name)
    stages: frozenset[int] = getattr(parameter, _STAGES_ATTRIBUTE, frozenset())
    setattr(parameter, _STAGES_ATTRIBUTE, stages | {stage})


give_parameters_a_method("add_pipeline_stage", add_pipeline_stage)


def infer_param_pipeline_stage(network: Layer) -> list[Tensor]:
    """Returns the parameters that this process's stages train.

    If no job runs, it begins here, which is collective.

    Args:
        network: The network, whose sublayers have stages.

    Raises:
        ConfigError: A stage is not below ``pipeline_stages``, or the options fit no job.
        StateError: Parameters have no stage; the message names all of them.
        UsageError: A stage is no int.
        PipelineTimeout: Some rank did not arrive within the limit.
    """
    stages = stages_of_parameters(network)
    options = context.options()
    count, chunks = options.pipeline_stages, default_chunks(options.schedule)
    missing = [name for name, _, declared in stages if not declared]
    if count > 1 and missing:
        raise StateError(
            f"parameters without a stage: {', '.join(missing)}",
            expected="a pipeline_stage on each sublayer that has parameters",
            fix="net.fc.pipeline_stage = 1, before infer_param_pipeline_stage()",
        )
    highest = {name: max(declared, default=0) for name, _, declared in stages}
    beyond = [f"{name} in {stage}" for name, stage in highest.items() if stage >= count * chunks]
    if beyond:
        raise ConfigError(
            f"stages go from 0 to {count * chunks - 1}",
            expected=f"numbers below pipeline_stages (={count})"
            + f" times the {chunks} chunks of {options.schedule}" * (chunks > 1),
            got=", ".join(beyond),
            fix="raise pipeline_stages, or give the sublayers other stages",
        )
    job = context.job()
    played: Collection[int] = range(count * chunks)
    if not job.local:
        schedule = build(options.schedule, ranks=count, micro_batches=2 * count, chunks=chunks)
        played = schedule.placement.stages_of(job.hcg.get_stage_id())
    return [p for _, p, declared in stages if count == 1 or not declared.isdisjoint(played)]


def stages_of_parameters(network: Layer) -> list[tuple[str, Tensor, frozenset[int]]]:
    """Returns the stages that each trained parameter of a network was declared for.

    If one sublayer with a stage contains another, the stage of the inner one counts.

    Returns:
        The name, the tensor and the stages of each parameter; no stages if none was declared.
    """
    declared: dict[int, set[int]] = {}
    stages = stages_of_layers(network)
    layers = dict(network.named_sublayers())
    staged = {id(layers[path]) for path in stages}
    for path, stage in stages.items():
        inner = [layer for layer in layers[path].sublayers() if id(layer) in staged]
        inner_parameters = {id(parameter) for layer in inner for parameter in layer.parameters()}
        for parameter in layers[path].parameters():
            if id(parameter) not in inner_parameters:
                declared.setdefault(id(parameter), set()).add(stage)
    return [
        (name, p, frozenset(declared.get(id(p), ())) | getattr(p, _STAGES_ATTRIBUTE, frozenset()))
        for name, p in network.named_parameters()
        if p.trainable
    ]


def stages_of_layers(network: Layer) -> dict[str, int]:
    """Returns the stages of the sublayers that have one, by name."""
    stages = {}
    for path, layer in network.named_sublayers():
        if hasattr(layer, "pipeline_stage"):
            _require_stage(layer.pipeline_stage, path)
            stages[path] = int(layer.pipeline_stage)
    return stages


def _require_stage(stage: object, name: str) -> None:
    """Raises UsageError or ConfigError if the stage of ``name`` is no number of at least 0."""
    rule = "pipeline_stage is the number of a stage, from 0"
    context.require_number("pipeline_stage", stage, 0, rule, "write cell.pipeline_stage = 0", name)

"""Checks the arguments of ``fleetpipe.pipeline`` before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleetpipe.aliases import Layer
from fleetpipe.capture.cutting.split_spec import Border
from fleetpipe.capture.tracing.signature import integer_tensors_at
from fleetpipe.dygraph.layers.run_stage import require_dynamic_graph
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.errors import ConfigError, UsageError, nearest
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_types import Inputs


def require_stage_numbers(num_stages: int | None, num_chunks: int, job: Job | None) -> int | None:
    """Checks the numbers of ranks and chunks that ``fleetpipe.pipeline`` got.

    Args:
        num_stages: The user's number of ranks of the pipeline; None if it was left out.
        num_chunks: Chunks on each rank.
        job: The current job, whose ``pp_degree`` is the number of ranks; None without a job.

    Returns:
        The number of ranks; None if it follows from the cut.

    Raises:
        ConfigError: An argument is no positive number, or ``num_stages`` is not the ``pp_degree``.
    """
    for name, value in (("num_stages", num_stages), ("num_chunks", num_chunks)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is no number of stages: {value!r}", fix="give 1, 2, 3, ..")
    ranks = num_stages if job is None else job.degrees.pp
    if num_stages not in (None, ranks, 0 if job is None else job.degrees.asked_pp):
        raise ConfigError(
            "the number of ranks of the pipeline is given twice, and differs",
            got=f"num_stages={num_stages}, and pp_degree={ranks} of fleet.init",
            fix="leave num_stages out: a job has its pp_degree",
        )
    return ranks


def ranks_for_stages(borders: Sequence[Border], ranks: int | None, chunks: int) -> int:
    """Returns the number of ranks that hold the stages of a model.

    Args:
        borders: The borders between the stages.
        ranks: The number of ranks that the user or the job asks for; None for any.
        chunks: Chunks on each rank.

    Raises:
        ConfigError: Ranks times chunks is not the number of stages.
    """
    stages = len(borders) + 1
    if stages % chunks or ranks not in (None, stages // chunks):
        raise ConfigError(
            f"split_spec cuts the model into {stages} stages",
            expected=f"{ranks * chunks}: ranks of the pipeline times chunks"
            if ranks
            else f"a multiple of num_chunks={chunks}",
            got=", ".join(map(str, borders)) or "no cut",
            fix="give one cut less than there are stages",
        )
    return stages // chunks


def require_plain_model(model: Layer) -> Layer:
    """Checks that a model may become a pipeline, and returns it.

    Raises:
        StateError: Static graph is on.
        UsageError: ``model`` is no built layer, or a pipeline already.
    """
    require_dynamic_graph("fleetpipe.pipeline")
    if isinstance(model, PipelineLayer) or hasattr(type(model), "train_batch"):
        raise UsageError(
            f"a {type(model).__name__} is a pipeline already",
            fix="give fleet.distributed_model the pipeline, and fleetpipe.pipeline a plain model",
        )
    if not isinstance(model, paddle.nn.Layer):
        is_class = isinstance(model, type) and issubclass(model, paddle.nn.Layer)
        raise UsageError(
            "a pipeline is made of a built nn.Layer",
            got=f"the class {model.__name__}" if is_class else type(model).__name__,
            fix=f"build it: {model.__name__}(..)"
            if is_class
            else "put the function into the forward of a Layer",
        )
    if type(model.forward).__name__.endswith("StaticFunction"):
        raise UsageError(
            f"the {type(model).__name__} has gone through paddle.jit.to_static: what its forward "
            "calls cannot be noted",
            fix="give fleetpipe.pipeline the model as it was before",
        )
    return model


def require_whole(example: Inputs, shape_inputs: Sequence[str | int]) -> None:
    """Raises an error if ``shape_inputs`` names inputs that are not tensors of integers.

    Args:
        example: The example inputs of the model.
        shape_inputs: The keys or indices of inputs whose numbers the forward may read.

    Raises:
        ConfigError: A key names no such input, or ``shape_inputs`` is a single text.
    """
    for key in shape_inputs:
        if isinstance(shape_inputs, str) or not integer_tensors_at(example, [key]):
            raise ConfigError(
                "shape_inputs names inputs of whole numbers",
                expected="several keys of example_inputs, or places in a tuple of them",
                got=repr(shape_inputs if isinstance(shape_inputs, str) else key),
                fix='pass a tuple, ("grids",), and example_inputs that have such tensors there',
            )


def resolve_no_split(model: Layer, no_split: Sequence[type | str]) -> list[type]:
    """Returns the classes of layers that ``no_split`` lists, themselves or by name.

    A name is looked up among the classes of the model's sublayers.

    Raises:
        ConfigError: ``no_split`` is no sequence, or the model has no sublayer of a class in it.
    """
    classes: dict[str, type] = {type(layer).__name__: type(layer) for layer in model.sublayers()}
    if isinstance(no_split, str) or not isinstance(no_split, Iterable):
        raise ConfigError(
            "no_split takes several classes", got=repr(no_split), fix="pass a tuple: (Block,)"
        )
    chosen = []
    for kind in no_split:
        if isinstance(kind, str) and kind not in classes:
            raise ConfigError(
                f"no_split names a class of which {type(model).__name__} has no sublayer",
                got=f"{kind!r}, {nearest(kind, classes)}",
                fix="pass the class itself, or its name",
            )
        chosen.append(classes[kind] if isinstance(kind, str) else kind)
    return chosen

"""What a user asks of ``fleetpipe.pipeline``, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Layer
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.errors import ConfigError, UsageError, nearest
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle


class StageArguments(NamedTuple):
    """How many stages are asked for.

    Attributes:
        ranks: Ranks of the pipeline; None where the cut says.
        chunks: Chunks on each.
    """

    ranks: int | None
    chunks: int

    @property
    def total(self) -> int | None:
        """The number of stages; None where the cut says."""
        return None if self.ranks is None else self.ranks * self.chunks

    def ranks_of(self, stages: int, cut: str) -> int:
        """Returns the ranks for as many stages as there are.

        Raises:
            ConfigError: They are not as many as were asked for.
        """
        if stages != (self.total or stages) or stages % self.chunks:
            raise ConfigError(
                f"split_spec cuts the model into {stages} stages",
                expected=f"{self.total}: ranks of the pipeline times chunks"
                if self.total
                else f"a multiple of num_chunks={self.chunks}",
                got=cut or "no cut",
                fix="give one cut less than there are stages",
            )
        return stages // self.chunks


def requested_stages(num_stages: int | None, num_chunks: int, job: Job | None) -> StageArguments:
    """Returns how many stages are asked for.

    Args:
        num_stages: Ranks of the pipeline, as the user says it.
        num_chunks: Chunks on each.
        job: The current job, whose ``pp_degree`` counts.

    Raises:
        ConfigError: One is no number of stages, or the job has another.
    """
    for name, value in (("num_stages", num_stages), ("num_chunks", num_chunks)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is no number of stages: {value!r}", fix="give 1, 2, 3, ..")
    ranks = num_stages if job is None else job.degrees.pp
    if num_stages not in (None, ranks):
        raise ConfigError(
            "the number of ranks of the pipeline is given twice, and differs",
            got=f"num_stages={num_stages}, and pp_degree={ranks} of fleet.init",
            fix="leave num_stages out: a job has its pp_degree",
        )
    return StageArguments(ranks, num_chunks)


def plain_model(model: Layer) -> Layer:
    """Returns a model that may become a pipeline.

    Raises:
        UsageError: It is no built layer, or a pipeline already.
    """
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


def classes_of(model: Layer, no_split: Sequence[type | str]) -> list[type]:
    """Returns the classes that ``no_split`` means.

    Raises:
        ConfigError: It is no sequence of such, or the model has no sublayer of that class.
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

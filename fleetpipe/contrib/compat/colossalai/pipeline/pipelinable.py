"""``PipelinableContext``: makes a model without memory, orders its layers, and cuts it.

A cut is a list of boundaries as in ``fleetpipe.partition``: the first layer of each stage, then the
number of layers. There are ranks times chunks stages; stage s is on rank s modulo ranks.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from fleetpipe.aliases import Layer
from fleetpipe.contrib.compat.colossalai import pipeline
from fleetpipe.contrib.compat.colossalai.context import gpc
from fleetpipe.contrib.compat.colossalai.pipeline import (
    SPLIT_NODE,
    ExecutionSequence,
    PipelinableModel,
)
from fleetpipe.dygraph.layers.entries import count_parameters
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.errors import ConfigError, PartitionError, StateError, nearest
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.partition import balanced, uniform

#: The layers of one rank: for each of its chunks the first one, and the one after the last.
LayerRanges = Sequence[tuple[int, int]]
#: Where a model is cut; see :class:`PipelinableContext`.
Policy = str | Mapping[int, LayerRanges]

POLICIES = ("uniform", "balanced", "customized")


def boundaries(
    policy: Policy, weights: Sequence[int], splits: Sequence[int], ranks: int, chunks: int
) -> list[int]:
    """Cuts a list of layers; returns the first layer of each stage, then the number of layers.

    Args:
        policy: ``"uniform"``: the list is cut into ``chunks`` pieces with equally many layers, and
            each piece into a stage for every rank, of equally many layers or one more for the last
            ranks; ``"balanced"``: the stage with the most parameters has as few as possible;
            ``"customized"``: stages begin at ``splits``; a mapping: by rank, the first layer of
            each of its chunks and the one after the last.
        weights: The number of parameters of each layer.
        splits: For each SPLIT_NODE in the sequence, the number of layers before it; only policy
            ``"customized"`` may have any.
        ranks: Ranks of the pipeline.
        chunks: Chunks of each rank.

    Raises:
        PartitionError: There is no such policy, or it does not fit the numbers.
    """
    count, stages = len(weights), ranks * chunks
    if splits and policy != "customized":
        raise PartitionError(
            f"exec_seq has {SPLIT_NODE}, and the policy is not 'customized'",
            got=f"policy {policy!r}",
            fix="PipelinableContext(policy='customized'), or leave the marks out",
        )
    if isinstance(policy, Mapping):
        return _boundaries_of_ranges(policy, ranks, chunks)
    if policy == "customized":
        return [0, *splits, count]
    if policy == "uniform":
        return _cut_uniformly(count, ranks, chunks)
    if policy != "balanced":
        raise PartitionError(f"there is no policy {policy!r}", fix=nearest(str(policy), POLICIES))
    # A layer without parameters counts as one: any number of them would else be in one stage.
    return balanced([max(weight, 1) for weight in weights], stages)


def _cut_uniformly(count: int, ranks: int, chunks: int) -> list[int]:
    """Returns the first layer of each stage under policy "uniform", then ``count``, of layers."""
    if count % chunks:
        raise PartitionError(
            f"policy 'uniform' cannot cut {count} layers into {chunks} equal chunks",
            expected=f"a number of layers that {chunks} (num_chunks) divides",
            got=f"{count} layers",
            fix="use policy 'balanced', or another number of chunks",
        )
    of_chunk = count // chunks
    starts = uniform(of_chunk, ranks)[:-1]
    return [*(chunk * of_chunk + start for chunk in range(chunks) for start in starts), count]


def _boundaries_of_ranges(policy: Mapping[int, LayerRanges], ranks: int, chunks: int) -> list[int]:
    """Returns the boundaries of a policy that lists the layers of each rank.

    Raises:
        PartitionError: Ranks or chunks are missing, or the ranges leave a gap or overlap.
    """
    numbers = {rank: len(of_rank) for rank, of_rank in policy.items()}
    if numbers != dict.fromkeys(range(ranks), chunks):
        raise PartitionError(
            "the policy does not give each rank its chunks",
            expected=f"ranks 0 to {ranks - 1} with {chunks} pairs (start, end) each",
            got=str({rank: list(of_rank) for rank, of_rank in policy.items()}),
            fix="write {rank: [(start, end), ..]} with one pair for each chunk",
        )
    ranges = [policy[rank][chunk] for chunk in range(chunks) for rank in range(ranks)]
    for stage, ((_, end_before), (start, end)) in enumerate(itertools.pairwise(ranges), 1):
        if start != end_before:
            raise PartitionError(
                "the layers of the policy leave a gap or overlap",
                where=f"rank {stage % ranks}, chunk {stage // ranks}",
                expected=f"a pair that begins with layer {end_before}",
                got=f"({start}, {end})",
                fix="chunk c of rank r goes on where the stage before it ends: rank r - 1, or for "
                "rank 0 the last rank's chunk c - 1",
            )
    first, _ = ranges[0]
    return [first, *(end for _, end in ranges)]


class PipelinableContext:
    """A context in which a model is built without memory; later it is cut into stages.

    :meth:`partition` gives values to the parameters of this process's stages only. Building the
    model changes no random state: all of them are restored at the end.

    Example:
        >>> from paddle.vision.models import resnet18
        >>> pipelinable = PipelinableContext()
        >>> with pipelinable:
        ...     model = resnet18()
        >>> names = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"]
        >>> flatten = (lambda x: paddle.flatten(x, 1), "behind")
        >>> pipelinable.to_layer_list([*names, "avgpool", flatten, "fc"])
        >>> pipelinable.partition(1, pipeline_size=2, rank=0).segment_parts
        [0, 7, 10]
    """

    def __init__(self, policy: Policy = "balanced") -> None:
        """Chooses where the model will be cut.

        Args:
            policy: ``"balanced"``: the stage with the most parameters has as few as possible;
                ``"uniform"``: as many layers in each stage; ``"customized"``: where ``exec_seq``
                has ``"SPLIT_NODE"``; or ``{rank: [(start, end), ..]}``, layers by their numbers,
                one pair for each chunk. It may be changed until :meth:`partition`.
        """
        #: The layers that were constructed within the context, in this order.
        self._recorded: list[weakref.ref[Layer]] = []
        #: The model that was built, and its layers in order; None before.
        self._model: Layer = None
        self._sequence: ExecutionSequence | None = None
        #: What is open between entering and leaving the context.
        self._contexts = ExitStack()
        self.policy = policy

    def __enter__(self) -> PipelinableContext:
        """Begins the context: layers that are built in it have no memory, and are recorded."""
        self._recorded = []
        with ExitStack() as entered:
            entered.enter_context(random_states_kept())
            entered.enter_context(_recording_layers(self._recorded))
            entered.enter_context(paddle.LazyGuard())
            self._contexts = entered.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the context, and stores the model that was built, unless an error was raised.

        Raises:
            ConfigError: More than one model was made, or none; or its constructor computes with
                parameters.
        """
        self._contexts.close()
        if error is None:
            references = [reference() for reference in self._recorded]
            layers = [layer for layer in references if layer is not None]
            self._model, self._sequence = _outermost_layer(layers), None
        elif isinstance(error, RuntimeError) and "PreconditionNotMet" in str(error):
            raise ConfigError(
                "a constructor computes with parameters, which have no memory yet",
                where="within PipelinableContext",
                cause=str(error).strip().splitlines()[0],
                fix="give the parameters a paddle.ParamAttr(initializer=..), or set_value",
            ) from error

    def to_layer_list(self, exec_seq: Iterable[object] | None = None) -> None:
        """Puts the layers of the model in the order of their execution.

        Args:
            exec_seq: Names of sublayers in the order in which they run; functions, which run after
                the layer named before them (at the beginning: on the inputs), as does ``(function,
                "behind")``; ``(function, "front")``, which runs before the next one;
                ``"SPLIT_NODE"``, where policy "customized" cuts. None: the children in the order of
                their construction, and the layers in LayerLists and Sequentials.

        Raises:
            ConfigError: An entry is none of these, names no sublayer, or has no layer before or
                after it; or a parameter of the model is in none of the named layers.
            StateError: No model was made within this context.
        """
        if self._model is None:
            raise StateError(
                "there is no model to list the layers of",
                fix="with pipelinable: model = resnet50(), then pipelinable.to_layer_list(..)",
            )
        self._sequence = pipeline.read_sequence(self._model, exec_seq)

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> PipelinableModel:
        """Builds the layers of this process's stages.

        Args:
            num_chunks: Chunks of each rank; with more than one 1F1B becomes Interleaved1F1B.
            pipeline_size: Ranks of the pipeline.
            rank: This process's rank in the pipeline.

        Returns:
            The stages of this process, or of all ranks if one process runs them all. Its
            ``parameters()`` are those that this process's optimizer trains. Layer i gets its
            initial values under the seed 1234 + i, whatever the cut and the rank.

        Raises:
            ConfigError: ``pipeline_size`` or ``rank`` is not that of the job, or ``num_chunks``
                not the configuration's.
            PartitionError: The policy does not fit the numbers.
            StateError: :meth:`to_layer_list` was not called.
        """
        _require_configured(num_chunks)
        if self._sequence is None:
            raise StateError(
                "the layers of the model are not in order yet",
                fix="call to_layer_list(exec_seq) after the with block",
            )
        _require_rank_of_process(rank, pipeline_size)
        steps, splits = self._sequence
        weights = [count_parameters(step.layer) for step in steps]
        bounds = boundaries(self.policy, weights, splits, pipeline_size, num_chunks)
        return PipelinableModel(self._model, steps, bounds, pipeline_size, num_chunks)


@contextmanager
def _recording_layers(layers: list[weakref.ref[Layer]]) -> Iterator[None]:
    """In this context, a reference to each new layer is appended to ``layers``."""
    constructor: Any = paddle.nn.Layer.__init__

    @functools.wraps(constructor)
    def construct(self: Layer, *args: Any, **named: Any) -> None:
        constructor(self, *args, **named)
        layers.append(weakref.ref(self))

    with replaced((paddle.nn.Layer, "__init__", construct)):
        yield


def _outermost_layer(layers: list[Layer]) -> Layer:
    """Returns the layer that contains all others of a list; layers without parameters do not count.

    Raises:
        ConfigError: There is no such layer, or several layers are in no other one.
    """
    inner = {id(sublayer) for layer in layers for sublayer in layer.sublayers()}
    outer = [layer for layer in layers if id(layer) not in inner and layer.state_dict()]
    if len(outer) == 1:
        return outer[0]
    raise ConfigError(
        "a PipelinableContext makes one model"
        if outer
        else "no model was made within the PipelinableContext",
        got=", ".join(type(layer).__name__ for layer in outer) or None,
        fix="make losses and other models outside of the with block"
        if outer
        else "with pipelinable: model = resnet50()",
    )


def _require_configured(num_chunks: int) -> None:
    """Raises ConfigError if NUM_CHUNKS is configured, and differs from ``num_chunks``."""
    configured = gpc.configured_chunks
    if configured not in (None, num_chunks):
        raise ConfigError(
            "partition cuts another number of chunks than are configured",
            expected=f"NUM_CHUNKS={configured} of the configuration",
            got=f"partition({num_chunks}, ..)",
            fix="partition(gpc.config.NUM_CHUNKS, ..), or leave NUM_CHUNKS out",
        )


def _require_rank_of_process(rank: int, pipeline_size: int) -> None:
    """Raises ConfigError if this process neither is rank ``rank``, nor runs all ranks."""
    job = current_job()
    played: Sequence[int] = range(pipeline_size)
    if job is not None and not job.local and job.degrees.pp == pipeline_size:
        played = (job.hcg.get_stage_id(),)
    if rank not in played:
        raise ConfigError(
            "partition builds the stages of this process",
            expected=f"rank {', '.join(map(str, played))} of a pipeline of {pipeline_size}",
            got=f"rank {rank}",
            fix="pass gpc.get_local_rank(ParallelMode.PIPELINE)",
        )

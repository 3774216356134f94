"""Records the outputs of layers that own parameters, to find the first one that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.compare.differences import Difference, compare
from fleetpipe.dygraph import PipelineLayer, tensor_parallel, tensors_of
from fleetpipe.dygraph.observe.trial import is_trial
from fleetpipe.extras import extra
from fleetpipe.job.job import current_job

#: By layer, the tensors that its calls returned, in the order of the calls.
Outputs = dict[str, list[Tensor]]


#: Whether a backward runs in this thread.
_in_backward = ContextVar("_in_backward", default=False)


@contextmanager
def backward_running() -> Iterator[None]:
    """While it is open, no output is recorded, since a backward may recompute a layer."""
    before = _in_backward.set(True)
    try:
        yield
    finally:
        _in_backward.reset(before)


@contextmanager
def record_model(model: Layer, names: Mapping[str, str]) -> Iterator[Outputs]:
    """Records the outputs of every layer that owns parameters while the context is open.

    Args:
        model: A Layer.
        names: The fully qualified name of each of its parameters and buffers.

    Yields:
        The outputs, by the layers' fully qualified names.
    """
    outputs: Outputs = {}
    handles = []
    owners = {inner.rpartition(".")[0]: name.rpartition(".")[0] for inner, name in names.items()}
    for path, layer in model.named_sublayers(include_self=True):
        # A part of a vocabulary head returns three numbers of a row; in one process, its input.
        if path in owners and getattr(layer, "has_plain_output", True):
            kept = outputs.setdefault(owners[path], [])
            handles.append(layer.register_forward_post_hook(_keeper(kept)))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def record_stages(layers: PipelineLayer) -> AbstractContextManager[Outputs]:
    """Records the outputs of this process's layers of a pipeline, as :func:`record_model` does.

    It leaves out shared layers: each rank makes some of their calls, in an order of its own; and
    the whole model, which a batch does not call: that of a capture may own parameters and buffers.
    """
    state = layers.state
    names = (n for n in state.local_tensors() if "." in n and not state.has_several_calls(n))
    return record_model(layers, {n: n for n in names})


def _keeper(kept: list[Tensor]) -> Callable[[Layer, Nest, Nest], None]:
    def keep(_layer: Layer, _inputs: Nest, output: Nest) -> None:
        # Copies: the next layer may work in place, and only where no border between stages stands
        # before it would both sides show it.
        if not (_in_backward.get() or is_trial()):
            kept.extend(tensor.detach().clone() for tensor in tensors_of(output))

    return keep


def compare_outputs(
    outputs: Outputs, expected: Outputs, step: int, replica: int = 0, call_of: str = ""
) -> list[Difference]:
    """Compares the outputs of this replica with those of the reference for the same data.

    Args:
        outputs: The outputs of the pipeline's layers.
        expected: The outputs of the reference's, for the data of all replicas or of this one.
        step: The training step.
        replica: The place of this replica's data in the reference's.
        call_of: A text for the names of differences, as ``" of eval_batch"``.
    """
    differences = []
    for layer, kept in outputs.items():
        theirs_of_all = expected[layer][replica * len(kept) :]
        for call, (ours, reference) in enumerate(zip(kept, theirs_of_all)):
            name, part = f"{layer}, call {call}{call_of}", part_of(reference, ours)
            if sequence_parts() and part.shape != ours.shape:
                continue  # places that stand in another axis, as those of all rows in one
            difference = compare("output", name, step, ours, part)
            if difference:
                differences.append(difference)
                break
    return differences


def sequence_parts() -> Any:
    """Returns the ``SequenceRanks`` of a job that splits sequences over ranks; else None."""
    job = current_job()
    if job is None or job.along("sep", "cp").ranks == 1:
        return None
    return extra("sequences").sequence_ranks()


def part_of(whole: Tensor, ours: Tensor) -> Tensor:
    """Returns the part of a reference's output that this rank has, if it has a shard of it."""
    group, ranks = tensor_parallel.model_parallel_group(), sequence_parts()
    for axis, (all_of_it, size) in enumerate(zip(whole.shape, ours.shape)):
        if axis == 1 and ranks is not None and all_of_it == size * ranks.ranks:
            whole = ranks.own_part(whole)
        elif all_of_it != size and all_of_it == size * group.nranks:
            return tensor_parallel.shard_of(whole, axis, group.rank, group.nranks)
    return whole

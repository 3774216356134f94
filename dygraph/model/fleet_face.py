"""Members of Fleet's ``PipelineLayer`` that users expect, and that nothing else here uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph.layers.entries import shared_attributes
from fleetpipe.dygraph.layers.tied import SharedLayer
from fleetpipe.dygraph.state.tied_weights import SharedWeight, sharing_group
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.job.job import Job

_OF_THE_WRAPPER = ("train_batch", "eval_batch", "predict_batch", "forward_backward_pipeline")


class NotWrapped(UsageError, AttributeError):
    """Raised if a ``PipelineLayer`` is used like its wrapper; ``hasattr`` returns False for it."""


def refuse_methods_of_the_wrapper(model: Layer, name: str) -> None:
    """Raises an error with advice if a script looks for a wrapper's method in the layers."""
    if name in _OF_THE_WRAPPER:
        raise NotWrapped(
            f"a PipelineLayer has no {name} before it is wrapped",
            got=f"{type(model).__name__}.{name}",
            cause="the model did not go through fleet.distributed_model, or what that returned "
            "was not kept",
            fix="model = fleet.distributed_model(model), after fleet.init",
        )


def shared_comm(
    entries: Sequence[Any],
    shared: Mapping[int, SharedLayer],
    layers: Mapping[str, Layer],
    weights: Sequence[SharedWeight],
    job: Job | None,
) -> dict[str, dict[str, Any]]:
    """Returns Fleet's table of shared layers that other ranks have copies of, by key.

    Args:
        entries: The whole list of layers.
        shared: The shared layers of the list, by each of their numbers.
        layers: The layers of this process, by their paths in the model.
        weights: The weights that this rank shares with others.
        job: The job of the model.
    """
    groups = {}
    for path, layer in layers.items():
        holders = [weight.holders for weight in weights if weight.name.startswith(f"{path}.")]
        if job is not None and holders:
            members = sorted({rank for ranks in holders for rank in ranks})
            first = min(index for index, one in shared.items() if one.path == path)
            groups[shared[first].key] = {
                "ranks": [job.hcg.get_rank_from_stage(rank) for rank in members],
                "group": sharing_group(job, members),
                "weight_attr": list(shared_attributes(entries[first])),
                "layer": layer,
            }
    return groups


def in_sequence(functions: Sequence[Callable[[Nest], Nest]]) -> Callable[..., Nest]:
    """Returns a function that calls each of ``functions`` with the result of the one before."""

    def run(*inputs: Nest) -> Nest:
        value: Nest = inputs[0] if len(inputs) == 1 else inputs
        for function in functions:
            value = function(value)
        return value

    return run


def require_chunk(number: int, chunks: int) -> None:
    """Refuses the number of a chunk that a process does not have.

    Args:
        number: The number.
        chunks: How many chunks the process has; 0 if the model is not cut into chunks.

    Raises:
        ConfigError: There is no such chunk.
    """
    if number not in range(chunks):
        raise ConfigError(
            f"there is no chunk {number}",
            expected=f"a number from 0 to {chunks - 1}"
            if chunks
            else "no chunk_id: each rank has one chunk",
            fix="pass the number of a chunk of this rank" if chunks else "leave chunk_id out",
        )


def refuse_schedule_nodes(_model: Layer, *_arguments: Any) -> NoReturn:
    """Refuses Fleet's schedule nodes, which exist for its own overlapped schedulers."""
    raise ConfigError(
        "fleetpipe's engine needs no schedule nodes",
        fix="choose a schedule with pipeline_configs['schedule_mode'], DualPipeV for instance",
    )

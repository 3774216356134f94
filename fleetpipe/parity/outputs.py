"""Keeps what each parameter-owning layer returns, to tell where two models begin to part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fleetpipe.dygraph import recompute, tensors_of

#: By layer, the tensors that its calls returned, in the order of the calls.
Outputs = dict[str, list[Any]]


@contextmanager
def recorded(model: Any, names: Mapping[str, str]) -> Iterator[Outputs]:
    """Records the outputs of every layer that owns parameters while the context is open.

    Args:
        model: A Layer.
        names: The lasting name of each of its parameters and buffers.

    Yields:
        The outputs, by the layers' lasting names.
    """
    outputs: Outputs = {}
    handles = []
    owners = {own.rpartition(".")[0]: name.rpartition(".")[0] for own, name in names.items()}
    for path, layer in model.named_sublayers(include_self=True):
        if path in owners:
            kept = outputs.setdefault(owners[path], [])
            handles.append(layer.register_forward_post_hook(_keeper(kept)))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keeper(kept: list[Any]) -> Any:
    def keep(_layer: Any, _inputs: Any, output: Any) -> None:
        # A layer that is recomputed is called a second time.
        if not recompute.rerunning():
            kept.extend(tensor.detach() for tensor in tensors_of(output))

    return keep

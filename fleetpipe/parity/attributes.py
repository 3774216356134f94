"""Plain attributes of layers that a script changes between two batches, as a temperature or a flag.

Plain are numbers, texts and None; tensors without a graph that no state dict has; functions that
refer to nothing but plain values; and lists, tuples and dicts of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from fleetpipe.aliases import Layer
from fleetpipe.compare.differences import digest_of
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.dygraph.backward.layer_state import PADDLES_ATTRIBUTES
from fleetpipe.dygraph.code_names import held_by
from fleetpipe.job.job import current_job
from fleetpipe.mesh.axes import SEQUENCE, SHARDS
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in
from fleetpipe.paddle_api.tensor import has_memory, is_parameter

_SIMPLE = (bool, int, float, str, type(None))

#: The path of a layer in the whole model, and the name of an attribute.
Key = tuple[str, str]


class AttributeCopies:
    """Gives a reference the plain attributes that differ in the pipeline's layers.

    What the two sides' own batches change is not copied: each side counts for itself.
    """

    def __init__(self, model: Layer, pipe: PipelineLayer) -> None:
        """Takes the reference's model and the pipeline, as they are before the first batch.

        What differs by then the script has set, unless the layers are those of shards: these have
        attributes of their own, such as the number of their heads, which are not copied.
        """
        # A copy of a captured model stands in a layer that calls it.
        self._model: Layer = getattr(model, "plain", model)
        job = current_job()
        shards = job is not None and any(
            getattr(job.degrees, a) > 1 for a in (*SHARDS, *SEQUENCE, "ep")
        )
        self._texts: dict[Key, str] = {}
        self._note(pipe.with_modes if shards else self._model)

    def take(self, pipe: PipelineLayer) -> None:
        """Copies what has changed since the last :meth:`note`. Collective over the pipeline.

        Another rank's functions are not copied, for a message carries none.
        """
        changed = {
            key: value
            for key, value, text in _plain_attributes(pipe.with_modes)
            if self._texts.get(key) != text and (key[0] or pipe.with_modes is not pipe)
        }
        sent = [[*key, value] for key, value in changed.items() if _can_be_sent(value)]
        for part in pipe.holders().all_gather(sent):
            for path, name, value in part:
                changed.setdefault((path, name), value)
        layers = dict(self._model.named_sublayers(include_self=True))
        for (path, name), value in changed.items():
            if path in layers:
                # Paddle makes a tensor a buffer that no state dict has.
                setattr(layers[path], name, _copy(value))

    def note(self, pipe: PipelineLayer) -> None:
        """Notes the attributes that a batch has left in the pipeline's layers."""
        self._note(pipe.with_modes)

    def _note(self, model: Layer) -> None:
        self._texts = {key: text for key, _, text in _plain_attributes(model)}


def _plain_attributes(model: Layer) -> Iterator[tuple[Key, Any, str]]:
    """Yields the plain attributes of all layers, each with a text by which it is compared."""
    for path, layer in model.named_sublayers(include_self=True):
        attributes = {n: v for n, v in vars(layer).items() if n not in PADDLES_ATTRIBUTES}
        saved = paddle.nn.Layer.state_dict(layer, include_sublayers=False)
        attributes.update((n, t) for n, t in buffers_in(layer).items() if n not in saved)
        for name, value in attributes.items():
            if (text := _text_of(value)) is not None:
                yield (path, name), value, text


def _text_of(value: Any) -> str | None:
    """Returns a text that only equal values have; None if a value is not plain."""
    if type(value) in _SIMPLE:
        return repr(value)
    if isinstance(value, paddle.Tensor):
        plain = value.stop_gradient and not is_parameter(value)
        return digest_of(value) if plain and has_memory(value) and value.is_dense() else None
    if isinstance(value, FunctionType):
        if value.__module__.startswith("fleetpipe."):
            return None  # in the place of a layer's own
        return _text_of_parts(f"function {id(value.__code__)}", held_by(value))
    if type(value) is dict:
        return _text_of_parts("dict", [*value.keys(), *value.values()])
    return _text_of_parts(type(value).__name__, value) if type(value) in (list, tuple) else None


def _text_of_parts(kind: str, parts: list[Any] | tuple[Any, ...]) -> str | None:
    texts = [text for part in parts if (text := _text_of(part)) is not None]
    return f"{kind}({', '.join(texts)})" if len(texts) == len(parts) else None


def _can_be_sent(value: Any) -> bool:
    """Whether a message can carry a plain value to another rank."""
    if type(value) is dict:
        return all(type(key) is str and _can_be_sent(part) for key, part in value.items())
    if type(value) in (list, tuple):
        return all(map(_can_be_sent, value))
    return not isinstance(value, FunctionType)


def _copy(value: Any) -> Any:
    """Returns a plain value with tensors, lists and dicts of its own."""
    if isinstance(value, paddle.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copy(part) for key, part in value.items()}
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value

"""The modes of layers: what a batch changes of them, and what the script has set.

The rule: what a script sets last of a layer, or of the whole by ``train()``, is the layer's mode in
training batches. An evaluation runs all layers in evaluation and leaves them there; the next batch
that trains puts those back of which the script has set nothing since. Two things say nothing of
training: the whole model's ``eval()``, and an ``eval()`` by which a script takes a ``train()`` back
that it wanted for an evaluation, as for samples of dropout.

To know what a script sets, an evaluation takes the mode away that a layer has of its own: without
one it is in evaluation (``paddle_api.layer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSet
from weakref import WeakSet

from fleetpipe.aliases import Layer

#: Layers that training batches run in evaluation.
_frozen: MutableSet[Layer] = WeakSet()
#: Layers that the script has put into training while their model is in evaluation.
_switched: MutableSet[Layer] = WeakSet()


def note(model: Layer) -> None:
    """Notes which modes the script has set since the last batch."""
    layers = model.sublayers(include_self=True)
    if vars(model).get("training") is False:
        # By the model's own eval(), or that of a layer around it.
        _leave(layers)
    for layer in layers:
        mode = vars(layer).get("training")
        if mode is None:
            continue
        if model.training:
            _switched.discard(layer)
            (_frozen.discard if mode else _frozen.add)(layer)
        elif mode:
            _switched.add(layer)
        else:
            (_switched.discard if layer in _switched else _frozen.add)(layer)
            _leave([layer])


def needs_switch(model: Layer) -> bool:
    """Whether a model is in evaluation, or a part of it as the evaluation of another left it."""
    layers = model.sublayers()
    return not model.training or not all("training" in vars(layer) for layer in layers)


def evaluate(model: Layer, switch: Callable[[], object]) -> None:
    """Puts a model into evaluation by ``switch``, and notes the modes that it trains with."""
    note(model)
    layers = model.sublayers(include_self=True)
    for layer in layers:
        if layer in _switched:
            _switched.discard(layer)
            _frozen.discard(layer)
    switch()
    _leave(layers)


def train(model: Layer, switch: Callable[[], object]) -> None:
    """Puts a model into training by ``switch``, and puts back the modes that the script has set."""
    note(model)
    modes = {
        layer: layer in _switched
        for layer in model.sublayers()
        if layer in _switched or layer in _frozen
    }
    switch()
    for layer, mode in modes.items():
        layer.training = mode


def in_training(model: Layer) -> list[tuple[str, bool]]:
    """Returns the path of each layer in a model, and in which mode the next batch trains it."""
    note(model)
    layers = model.named_sublayers()
    return [(path, layer in _switched or layer not in _frozen) for path, layer in layers]


def _leave(layers: Iterable[Layer]) -> None:
    """Takes the mode of their own from layers that are in evaluation."""
    for layer in layers:
        if not layer.training:
            layer.__dict__.pop("training", None)

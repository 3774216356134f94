"""Refuses additions to a model around its list of layers that cannot be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.layers.tied import SharedLayer, is_shared
from fleetpipe.errors import ConfigError, listed
from fleetpipe.paddle_api.layer import forward_hooks


def refuse_untied(
    parameters: Mapping[str, Tensor],
    built: Mapping[str, Tensor],
    tied: Sequence[SharedLayer],
    rank_of_layer: Callable[[int], int],
) -> None:
    """Refuses new trained parameters in a shared layer that several ranks have copies of.

    Args:
        parameters: This process's parameters by fully qualified name.
        built: The parameters that it had when the model was built.
        tied: The shared layers of the list.
        rank_of_layer: Returns the rank that owns a layer, from its number.
    """
    spread = [one for one in tied if len({rank_of_layer(i) for i in one.indices}) > 1]
    names = {name for one in spread for name in one.names.values()}
    paths = tuple(f"{one.path}." for one in spread)
    present, before = ({id(p) for p in held.values()} for held in (parameters, built))
    changed = [name for name, p in built.items() if name in names and id(p) not in present]
    changed += [
        name
        for name, p in parameters.items()
        if name.startswith(paths) and not p.stop_gradient and id(p) not in before
    ]
    if changed:
        raise ConfigError(
            "a layer that several ranks share was given other parameters",
            got=listed(changed),
            cause="each rank would train a copy of its own: what ranks share is said by the "
            "SharedLayerDesc when the model is built",
            fix="leave shared layers as they are, or freeze what is put into them; or build them "
            "with it, by a class of your own in the SharedLayerDesc",
        )


def refuse_own_forward(model: Layer, forward: Callable[..., Any]) -> None:
    """Refuses a model whose class, or script, has a ``forward`` of its own.

    Fleet's wrapper calls it once on each rank, so its effect would depend on their number.
    """
    if getattr(model.forward, "__func__", None) is not forward:
        raise ConfigError(
            "a batch runs the layers of the list, and no forward of the model's own",
            got=f"{type(model).__name__}.forward",
            fix="make what it does a layer or a function of the list, and leave forward out",
        )


def refuse_hooks(model: Layer) -> None:
    """Refuses forward hooks on a whole model: a batch calls its layers, and never the whole."""
    hooks = [hook for of_one in forward_hooks(model) for hook in of_one.values()]
    if hooks:
        raise ConfigError(
            "a batch runs the layers of the list, and no forward hook of the whole model",
            got=listed([getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]),
            cause="register_forward_pre_hook or register_forward_post_hook of the model",
            fix="make what it does a function of the list; or register it on a layer of the "
            "list; remove() it where it is for direct calls alone",
        )


def refuse_apart(
    layers: Mapping[int, tuple[int, int]], elsewhere: Mapping[int, tuple[int, int]]
) -> None:
    """Refuses built layers that another pipeline of the job has on other ranks.

    Args:
        layers: The number in the list and the rank of each built layer with parameters, by its id.
        elsewhere: The same of the other pipeline.
    """
    for layer, (number, rank) in layers.items():
        other, other_rank = elsewhere.get(layer, (number, rank))
        if other_rank != rank:
            raise ConfigError(
                "a built layer stands in two pipelines, which have it on different ranks",
                where=f"layer {number} of this list, layer {other} of the other",
                got=f"rank {rank} here, rank {other_rank} there",
                cause="each rank has a layer of its own: one is trained, the other stays as it was",
                fix="cut both lists with seg_method=[..] so that layers of both are on the same "
                "ranks, or train them in one process",
            )


def refuse_unlisted(parameters: Mapping[str, Tensor], of_losses: Sequence[Tensor]) -> None:
    """Refuses trained parameters outside of the model's list, which no stage would use.

    Args:
        parameters: This process's parameters by fully qualified name.
        of_losses: The parameters of loss functions, which may also be attributes of the model.
    """
    names = [
        name
        for name, parameter in parameters.items()
        if not (is_shared(name) or name.partition(".")[0].isdecimal() or parameter.stop_gradient)
        and not any(parameter is one for one in of_losses)
    ]
    if names:
        raise ConfigError(
            "the model has trained parameters that are of no layer of its list",
            got=listed(names),
            cause="a layer was registered beside the list, after super().__init__() say: no stage "
            "runs it",
            fix="add the layer to the list, or freeze its parameters",
        )

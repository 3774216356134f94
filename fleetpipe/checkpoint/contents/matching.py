"""Matches the tensors of a checkpoint with those of a model: by name, or by order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleetpipe.checkpoint.contents.parts import MODEL, Saved, TensorName
from fleetpipe.errors import CheckpointError, listed
from fleetpipe.mesh.parts import ModelParts

_Shapes = Mapping[str, tuple[int, ...]]


def saved_names(parts: ModelParts, saved: Saved) -> dict[str, str]:
    """Returns the saved name of each tensor of a model: by name, by plain name, or by order.

    Args:
        parts: What this process holds of the model.
        saved: The description of the checkpoint.

    Raises:
        CheckpointError: The checkpoint has other tensors, other names in an unknown order, or
            other adapters.
    """
    wanted, plain_names = parts.shapes, parts.plain_names
    # Of which layers they are the names tell, however their targets were written.
    scale, other = (text.partition(", targets")[0] for text in (parts.adapters, saved.adapters))
    if scale and other not in ("", scale):
        raise CheckpointError(
            "the checkpoint has other adapters than the model",
            expected=parts.adapters,
            got=saved.adapters,
            fix="call lora.adapt with the targets, the rank and the alpha of the checkpoint",
        )
    if set(saved.order) == set(wanted):
        return {name: name for name in wanted}
    here = dict(zip(plain_order(tuple(wanted), plain_names) or wanted, wanted))
    there = dict(zip(saved.plain_order or saved.order, saved.order))
    if here.keys() == there.keys():
        return {name: there[plain] for plain, name in here.items()}
    shapes = {plain: saved.tensors[TensorName(MODEL, name)].shape for plain, name in there.items()}
    if parts.adapters:
        raise CheckpointError(
            "the checkpoint has adapters, or trained parameters, of other layers than the model",
            expected=listed([name for name in here if name not in there]),
            got=listed([name for name in there if name not in here]),
            fix="call lora.adapt with the targets of the checkpoint, and set stop_gradient = False "
            "of what it has trained besides",
        )
    ordered = saved.plain_order != saved.order
    _require_same_shapes({n: wanted[name] for n, name in here.items()}, shapes, ordered)
    return dict(zip(wanted, saved.order))


def plain_order(order: tuple[str, ...], plain_names: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the first plain name of each fully qualified name; empty if both are the same."""
    first = {full: plain for plain, full in reversed([*plain_names.items()])}
    plain = tuple(first.get(name, name) for name in order)
    return () if plain == order else plain


def without_copies(
    saved: Saved,
    order: tuple[str, ...],
    plain_names: Mapping[str, str],
    read: Callable[[str], bytes],
) -> Saved:
    """Removes further names of tied weights, of which other programs save copies.

    Args:
        saved: The description of the checkpoint.
        order: The names of the model's tensors in its order, each once.
        plain_names: See :class:`ModelParts`.
        read: Returns the bytes of a saved tensor of the model.
    """
    names = {*(plain_order(order, plain_names) or order)}
    there = dict(zip(saved.plain_order or saved.order, saved.order))
    if not names < there.keys():
        return saved

    def has_copy(name: str) -> bool:
        described = saved.tensors[TensorName(MODEL, name)]
        alike = (n for n in names if saved.tensors[TensorName(MODEL, there[n])] == described)
        return any(read(there[other]) == read(name) for other in alike)

    kept = {plain: name for plain, name in there.items() if plain in names or not has_copy(name)}
    plain = tuple(kept) if saved.plain_order else ()
    return saved._replace(order=tuple(kept.values()), plain_order=plain)


def _require_same_shapes(wanted: _Shapes, saved: _Shapes, ordered: bool) -> None:
    missing = [name for name in wanted if name not in saved]
    other = [name for name in saved if name not in wanted]
    if len(wanted) != len(saved):
        raise CheckpointError(
            "the checkpoint is of another model",
            expected=f"{len(wanted)} parameters and buffers, {listed(missing or [*wanted])}",
            got=f"{len(saved)}, {listed(other or [*saved])}",
            fix="build the model that was saved",
        )
    if not ordered:
        raise CheckpointError(
            "the checkpoint has other names than the model, and does not say the model's order",
            expected=listed(missing),
            got=listed(other),
            cause="files of safetensors are sorted by name, and a map of names has its own order",
            fix="load it with names=, or convert it with --names: a map to the names of the model",
        )
    for (name, shape_here), (other_name, shape) in zip(wanted.items(), saved.items()):
        if shape_here != shape:
            raise CheckpointError(
                f"{other_name!r} of the checkpoint does not fit {name!r}",
                expected=f"shape {list(shape_here)}",
                got=f"shape {list(shape)}",
                cause="models with other names are matched in their order, and the layers of one "
                "are declared in another order",
                fix="declare the layers in the order of the model that was saved",
            )

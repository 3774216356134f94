"""Parameters that are parts of whole ones: a checkpoint has the whole, under one name.

How many parts there are, and which process has which, depends on the ranks that train; the whole
does not. A process that has several parts saves and restores them as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fleetpipe.aliases import Tensor
from fleetpipe.checkpoint.contents.parts import Held, TensorName
from fleetpipe.checkpoint.files.tensors import Region
from fleetpipe.paddle_api import paddle


class PartOfWhole(NamedTuple):
    """What makes a parameter a part of a whole one, as its attribute ``part_of_whole``.

    Attributes:
        number: That of the part, whose layer stands so many places behind that of the first.
        cut: Which part of the whole it is.
    """

    number: int
    cut: Region

    def taken_from(self, whole: Any) -> Any:
        """Returns the part of a whole tensor or array."""
        return _between(whole, self.cut, self.cut.start, self.cut.stop)

    def whole_name(self, name: str) -> str:
        """Returns the lasting name of the whole, given that of the part."""
        *path, attribute = name.split(".")
        if attribute == f"part{self.number}":
            return ".".join([*path, "weight"])
        # A layer of a list of layers, or of one layer that has all parts.
        stem = [str(int(path[0]) - self.number)] if len(path) == 1 else path[:-1]
        return ".".join([*stem, attribute])


def part_of(tensor: Tensor) -> PartOfWhole | None:
    """Returns which part of a whole one a parameter is; None where it is whole itself."""
    part: PartOfWhole | None = getattr(tensor, "part_of_whole", None)
    return part


def whole_name(name: str, part: PartOfWhole | None) -> str:
    """Returns the name under which a checkpoint has a parameter."""
    return name if part is None else part.whole_name(name)


def parted(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns a state in which parts stand in the place of what is whole.

    Args:
        state: Tensors or arrays by name.
        tensors: By name, the parameters that it is for.
    """
    split: dict[str, Any] = {}
    wholes = set()
    for name, tensor in tensors.items():
        part = part_of(tensor)
        whole = None if part is None else state.get(part.whole_name(name))
        # The first part may go by the name of the whole.
        if part is not None and whole is not None and _is_whole(whole, part.cut):
            split[name] = part.taken_from(whole)
            wholes.add(part.whole_name(name))
    return {**{name: value for name, value in state.items() if name not in wholes}, **split}


def _is_whole(value: Any, cut: Region) -> bool:
    shape = tuple(value.shape)
    return len(shape) > cut.axis and shape[cut.axis] == cut.size


def _between(tensor: Any, cut: Region, start: int, stop: int) -> Any:
    """Returns what stands between two places along the axis of a cut."""
    return tensor[(slice(None),) * cut.axis + (slice(start, stop),)]


class JoinedParts:
    """What a process holds, each tensor once: parts of one tensor are joined.

    Attributes:
        held: By name. What is made of several parts is a copy.
    """

    def __init__(self, tensors: Iterable[tuple[TensorName, Held]]) -> None:
        """Takes tensors, those of one name in the order of their parts."""
        parts: dict[TensorName, list[Held]] = {}
        for name, held in tensors:
            parts.setdefault(name, []).append(held)
        self.held = {name: _joined(ones) for name, ones in parts.items()}
        self._parts = [(self.held[name], ones) for name, ones in parts.items() if len(ones) > 1]

    def hand_out(self) -> None:
        """Gives the parts what the joined tensors have been filled with."""
        for whole, parts in self._parts:
            for part in parts:
                target: Tensor = part.tensor
                value: Tensor = whole.tensor
                if part.cut is not None and whole.cut is not None:
                    start, stop = (place - whole.cut.start for place in part.cut[1:3])
                    value = _between(value, part.cut, start, stop)
                if part is not whole:
                    target.set_value(value)


def _joined(parts: list[Held]) -> Held:
    first, last = parts[0], parts[-1]
    if first.cut is None or last.cut is None or len(parts) == 1:
        # One number, such as the powers of Adam, is the same for all parts.
        return first
    tensors: list[Tensor] = [part.tensor for part in parts]
    values = paddle.concat([tensor.detach() for tensor in tensors], first.cut.axis)
    return Held(values, first.cut._replace(stop=last.cut.stop), first.differs)

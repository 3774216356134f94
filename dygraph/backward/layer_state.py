"""What layers are before a call, and how they become so again for a second one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.backward.contents import CONTAINERS, content_of, refill
from fleetpipe.dygraph.nest import leaf_like
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, forward_hooks, parameters_in, state_slots
from fleetpipe.paddle_api.tensor import tensor_bytes

#: The bytes of a buffer up to which it is copied in each call, whether it changes or not.
SMALL = 2**14

#: The attributes that every layer has.
_PADDLES = vars(paddle.nn.Layer()).keys()

#: Where a buffer stands: the id of a layer's table, and the name in it.
Key = tuple[int, str]


class _Slot(NamedTuple):
    """A buffer, or a statistic among the parameters.

    Attributes:
        table: The layer's.
        name: In it.
        tensor: What stood there.
        version: That of the tensor.
        copy: Its numbers; None where nothing is known to write into it.
    """

    table: dict[str, Any]
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def is_large(self) -> bool:
        return tensor_bytes(self.tensor) > SMALL

    def again(self, where: str) -> Tensor:
        """Returns a copy for a second call."""
        if self.copy is not None:
            return leaf_like(self.copy, copied=True)
        if self.tensor.inplace_version == self.version:
            return leaf_like(self.tensor, copied=True)
        raise ConfigError(
            f"a layer writes into its buffer {self.name!r}, and in its first call did not",
            where=where,
            cause=f"a buffer of more than {SMALL} bytes is not copied for each micro-batch where "
            "the first one leaves it as it is",
            fix=f"assign a new tensor, self.{self.name} = .., or set recompute_interval=0",
        )


class LayerStates:
    """The attributes, buffers and statistics of layers as they are at one time.

    Lists, dicts and sets among the attributes get back what they held, but no deeper ones.
    """

    def __init__(self, layers: Iterable[Layer], written: Container[Key] | None) -> None:
        """Takes them down.

        Args:
            layers: The layers.
            written: The larger buffers that are to be copied; None for all.
        """
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._slots: list[_Slot] = []
        for layer in layers:
            tables = layer.__dict__, parameters_in(layer), buffers_in(layer)
            attributes, parameters, buffers = (table.copy() for table in tables)
            # A schedule puts another forward in for each action.
            attributes.pop("forward", None)
            of_user = (attributes[name] for name in attributes.keys() - _PADDLES)
            for value in (*forward_hooks(layer), *of_user):
                if isinstance(value, CONTAINERS):
                    self._contents.append((value, content_of(value)))
            held = {name: value for name, value in buffers.items() if not _is_computed(value)}
            self._tables += zip(tables, (attributes, parameters, held))
            for table, name in state_slots(layer):
                if not _is_computed(table[name]):
                    self._slots.append(_slot(table, name, written))

    def written_since(self) -> frozenset[Key]:
        """Returns the larger buffers that were written into; lets go of copies of the others."""
        keys = set()
        for number, slot in enumerate(self._slots):
            if slot.is_large and slot.copy is not None:
                if slot.tensor.numpy().tobytes() == slot.copy.numpy().tobytes():
                    version = slot.tensor.inplace_version
                    self._slots[number] = slot._replace(copy=None, version=version)
                else:
                    keys.add((id(slot.table), slot.name))
        return frozenset(keys)

    @contextmanager
    def put_back(self, where: str) -> Iterator[None]:
        """Within it the layers are what they were, with copies of their buffers.

        Raises:
            ConfigError: A buffer has changed of which there is no copy; ``where`` says in what.
        """
        copies = [slot.again(where) for slot in self._slots]
        now = [table.copy() for table, _ in self._tables]
        contents = [(container, content_of(container)) for container, _ in self._contents]
        try:
            for container, content in self._contents:
                refill(container, content)
            for table, then in self._tables:
                for name in table.keys() - then.keys():
                    if name != "forward" and not _is_computed(table[name]):
                        del table[name]
                table.update(then)
            for slot, copy in zip(self._slots, copies):
                slot.table[slot.name] = copy
            yield
        finally:
            for (table, _), values in zip(self._tables, now):
                table.clear()
                table.update(values)
            for container, content in contents:
                refill(container, content)


def _slot(table: dict[str, Any], name: str, written: Container[Key] | None) -> _Slot:
    tensor = table[name]
    slot = _Slot(table, name, tensor, tensor.inplace_version, None)
    if written is None or not slot.is_large or (id(table), name) in written:
        return slot._replace(copy=leaf_like(tensor, copied=True))
    return slot


def _is_computed(value: object) -> bool:
    """Whether it is a tensor of a graph, as the weight that ``weight_norm`` computes."""
    return isinstance(value, paddle.Tensor) and not value.stop_gradient

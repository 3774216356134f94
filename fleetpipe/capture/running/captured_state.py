"""The parameters and buffers of a captured model: their names, Fleet's files of them, their memory.

Whatever the cut is, they have the plain model's names on all ranks, and its order in Fleet's files:
a save of two stages can be loaded into three. Tensors of other ranks' stages, and of a lazy model,
have no memory: a capture needs only their shapes, and a node gets zeros while it runs.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.tracing.value import Capture, Node, like
from fleetpipe.dygraph.layers.entries import FIRST_SEED
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.dygraph.state.files import LayerFiles, LayerInParts
from fleetpipe.dygraph.state.names import ModelState, Slot
from fleetpipe.errors import ConfigError
from fleetpipe.fleet_files.manifest import LayerFile
from fleetpipe.job import meeting
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind, memory_limit, process_bytes
from fleetpipe.paddle_api.layer import (
    TABLES,
    buffers_in,
    copy_unsaved_names,
    parameters_in,
    sublayers_in,
)
from fleetpipe.paddle_api.tensor import has_memory, is_parameter, is_state_of_cudnn, release_memory
from fleetpipe.schedules import Placement

#: Tensors for each parameter: value, gradient, two moments, and the value that is compared.
_COPIES = 5


def without_memory(model: Layer) -> dict[str, Tensor]:
    """Returns the parameters of a model that have no memory, by name; buffers are left out."""
    state = model.state_dict().items()
    return {name: t for name, t in state if is_parameter(t) and not has_memory(t)}


@contextmanager
def lent(tensors: Iterable[Tensor]) -> Iterator[None]:
    """While it is open, tensors without memory are zeros.

    The cuDNN buffer of an LSTM is left out: on a CPU it never has memory, and fails with zeros.
    """
    without = (tensor for tensor in tensors if not has_memory(tensor))
    borrowers = [tensor for tensor in without if not is_state_of_cudnn(tensor)]
    for tensor in borrowers:
        zeros = np.zeros(tensor.shape, str(tensor.dtype).rpartition(".")[2])
        tensor.get_tensor().set(zeros, paddle.CPUPlace())
    try:
        yield
    finally:
        release(borrowers)


def release(tensors: Iterable[Tensor]) -> None:
    """Frees the memory of tensors, which keep their shapes."""
    for tensor in tensors:
        if has_memory(tensor):
            release_memory(tensor)


def initialize(model: Layer, parameters: Mapping[str, Tensor]) -> None:
    """Sets the first values of parameters that were made under ``paddle.LazyGuard``.

    The seed of each is its index in the whole model, so that its value does not depend on which
    parameters a rank has.
    """
    with random_states_kept():
        for number, (name, tensor) in enumerate(model.state_dict().items()):
            if name in parameters and is_parameter(tensor) and not has_memory(tensor):
                paddle.seed(FIRST_SEED + number)
                tensor.initialize()


def return_memory() -> None:
    """Returns freed memory to the system: glibc by itself returns only the largest blocks."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def bytes_to_train(model: Layer, trace: Capture) -> int:
    """Estimates how many bytes a copy of a model needs to train one micro-batch.

    Args:
        model: The model, whose tensors may have no memory.
        trace: The captured forward in training; memory within its nodes is not counted.
    """
    state = sum(like(tensor).nbytes for tensor in model.state_dict().values())
    activations = sum(one.nbytes for one in trace.likes if math.prod(one.shape))
    return _COPIES * state + 2 * activations


def bytes_for_each_process() -> int | None:
    """Returns the free bytes for each process of this host; None if they are unknown."""
    if device_kind() == "gpu":
        return memory_limit() - process_bytes()
    free = _available()
    here = int(os.environ.get("PADDLE_LOCAL_SIZE", meeting.world_size()))
    return None if free is None else free // max(here, 1)


def _available() -> int | None:
    """Returns the free bytes of this host; None where /proc/meminfo does not have them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return next((1024 * size for size in kilobytes), None)


class CapturedState(ModelState):
    """One rank's part of the state of a captured model; fully qualified names are the model's."""

    def __init__(
        self,
        part: Layer,
        slots: Sequence[Slot],
        stages: Mapping[str, Sequence[int]],
        nodes: Sequence[str],
        group: Callable[[], Group],
    ) -> None:
        """Describes the whole model and the part that this process has.

        Args:
            part: The part; its sublayers have the names that they have in the model.
            slots: The names and shapes of the whole model.
            stages: By name, the stages that use a parameter or buffer.
            nodes: The names of all nodes, in order.
            group: Returns the group of the ranks that hold the stages.
        """
        self._model = part
        self._slots = list(slots)
        self._built = frozenset(slot.name for slot in slots)
        self._stages = stages
        self._nodes = nodes
        self._group = group
        self._parameters: dict[str, Tensor] = {}

    def keep_parameters(self) -> None:
        """Stores the current parameters of the part; later states have these."""
        self._parameters = {n: t for n, t in super()._named_tensors() if is_parameter(t)}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # A script may replace a parameter, which is refused; it then saves the trained ones.
        named, kept = super()._named_tensors(), self._parameters
        here = {name: t for name, t in named if name in kept or not is_parameter(t)}
        return iter({**here, **kept}.items())

    def hidden_buffers(self) -> dict[str, Tensor]:
        """Returns no buffers: their names would need the number of a layer."""
        return {}

    @property
    def spreads_experts(self) -> bool:
        """Whether ranks of a stage hold different experts: never in a capture."""
        return False

    @property
    def adds_up_uses(self) -> bool:
        """Whether several stages use one weight, so that its gradient is added up by stage."""
        return any(len(users) > 1 for users in self._stages.values())

    def has_several_calls(self, name: str) -> bool:
        """Whether calls of the layer of a tensor may be on several ranks."""
        return len(self._stages[name]) > 1

    def stage_of(self, name: str) -> int | None:
        """Returns the first stage that uses a parameter or buffer."""
        return self._stages[name][0]

    def slots(self) -> list[Slot]:
        """Returns the names and shapes of the whole model."""
        return self._slots

    def positions(self) -> dict[str, int]:
        """Returns the index of each tensor in the plain model, by name."""
        return {slot.name: position for position, slot in enumerate(self._slots)}

    def outlines(self) -> list[str]:
        """Returns the names and shapes of the whole model, and its nodes, as text."""
        return [*(f"{slot.name}{list(slot.shape)}" for slot in self._slots), *self._nodes]

    def _qualified_name(self, name: str) -> str:
        return name

    def _state_in(self, model: Layer) -> dict[str, Tensor]:
        """Returns the state of a model without buffers that its forward has registered."""
        state = super()._state_in(model).items()
        return {name: tensor for name, tensor in state if not self._is_late(name, tensor)}


def stages_of(
    model: Layer, nodes_of: Callable[[int], Sequence[Node]], stages: int
) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter or buffer of a model, by name.

    A tensor that no node uses is in stage 0.
    """
    users: dict[int, list[int]] = {}
    for stage in range(stages):
        part = part_of(model, nodes_of(stage))
        for tensor in {id(t): t for t in part.state_dict().values()}.values():
            users.setdefault(id(tensor), []).append(stage)
    return {name: tuple(users.get(id(tensor), (0,))) for name, tensor in model.state_dict().items()}


def part_of(model: Layer, nodes: Sequence[Node], more: Collection[int] = ()) -> Layer:
    """Returns a Layer with the tensors and sublayers that nodes use, under the model's names.

    Args:
        model: The model, which is not changed.
        nodes: The nodes.
        more: The ids of further parameters and buffers.
    """
    layers = {id(node.function) for node in nodes if node.is_layer}
    tensors = {id(getattr(one.layer, one.name)) for node in nodes for one in node.owned}
    return _part(model, layers, tensors.union(more))


def _part(layer: Layer, layers: set[int], tensors: set[int]) -> Layer:
    """Returns a Layer with the used tensors and sublayers; the layer itself if it uses all.

    Args:
        layer: A layer of the model.
        layers: The ids of the layers that are used as a whole.
        tensors: The ids of the tensors that are used.
    """
    part = paddle.nn.Layer()
    whole = True
    for name, sublayer in sublayers_in(layer).items():
        if sublayer is not None:
            kept = sublayer if id(sublayer) in layers else _part(sublayer, layers, tensors)
            has_tensors = any(True for _ in chain(sublayer.parameters(), sublayer.buffers()))
            whole = whole and (kept is sublayer or not has_tensors)
            if kept is sublayer or any(getattr(kept, table) for table in TABLES):
                sublayers_in(part)[name] = kept
    # Not by add_parameter, which refuses a name that Layer has itself.
    for held in (parameters_in, buffers_in):
        for name, tensor in held(layer).items():
            if tensor is not None and id(tensor) in tensors:
                held(part)[name] = tensor
            whole = whole and (tensor is None or name in held(part))
    if whole and any(getattr(part, table) for table in TABLES):
        return layer
    copy_unsaved_names(layer, part)
    return part


class _ShardOnly(paddle.nn.Layer):
    """A layer with some tensors under their names in the whole model."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        parameters_in(self).update(tensors)


def files_of_model(
    slots: Sequence[Slot],
    users: Mapping[str, Sequence[int]],
    tensors: Mapping[str, Tensor],
    stages: Collection[int],
    placement: Placement,
    job: Job | None,
    group: Callable[[], Group],
) -> LayerFiles:
    """Returns the files of Fleet for a captured model.

    Args:
        slots: The parameters and buffers of the whole model, in its order.
        users: By name, the stages that use a parameter or buffer.
        tensors: The tensors of this process, by name.
        stages: The stages of this process.
        placement: The rank of each stage.
        job: The job of the model; None if it was built outside of one.
        group: Returns the group of the ranks that hold the stages.

    Raises:
        ConfigError: The first uses of a layer's parameters are on several ranks.
    """
    layers: dict[str, list[str]] = {}
    in_parts: dict[str, dict[str, list[Tensor]]] = {}
    for slot in slots:
        path = slot.whole.name.rpartition(".")[0]
        layers.setdefault(path, []).append(slot.name)
        if slot.part is not None and slot.name in tensors:
            parts = in_parts.setdefault(path, {}).setdefault(slot.whole.name, [])
            parts.append(tensors[slot.name])
    # The rank that uses a weight first writes it, and reads it for all its holders.
    sources = {name: placement.rank_of(first) for name, (first, *_) in users.items()}
    places: dict[LayerFile, _ShardOnly | LayerInParts] = {}
    for number, (path, names) in enumerate(layers.items()):
        if path in in_parts:
            places[LayerFile(number)] = LayerInParts(in_parts[path], group)
            continue
        if len({sources[name] for name in names}) > 1:
            raise ConfigError(
                "the parameters of a layer are on several ranks: Fleet has one file for it",
                where=path,
                cause="operations in several stages take them one by one",
                fix="write pipe.full_state_dict() by paddle.save, or cut elsewhere",
            )
        if users[names[0]][0] in stages:
            places[LayerFile(number)] = _ShardOnly({name: tensors[name] for name in names})
    return LayerFiles(places, places, sources, job)

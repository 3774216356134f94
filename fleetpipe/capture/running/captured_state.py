"""Names, saves and allocates the parameters and buffers of a captured model: its state.

Whatever the cut is, they have the plain model's names on all ranks, and its order in Fleet's files:
a save of two stages can be loaded into three. Tensors of other ranks' stages, and of a model built
under ``paddle.LazyGuard``, have no memory: a capture needs only their shapes, and a node that uses
them gets zeros while it runs.
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
from fleetpipe.capture.tracing.value import Capture, Node, spec_of
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

#: The number of tensors for each parameter of a model that trains: value, gradient, two moments of
#: the optimizer, and the value that is compared.
_COPIES = 5


def without_memory(model: Layer) -> dict[str, Tensor]:
    """Returns the parameters of a model that have no memory, by name; buffers are left out."""
    state = model.state_dict().items()
    return {name: t for name, t in state if is_parameter(t) and not has_memory(t)}


@contextmanager
def lend_zeros(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Fills tensors that have no memory with zeros while this context is open.

    The cuDNN buffer of an LSTM is left out: on a CPU it never has memory, and fails with zeros.
    """
    without_memory = (tensor for tensor in tensors if not has_memory(tensor))
    filled = [tensor for tensor in without_memory if not is_state_of_cudnn(tensor)]
    for tensor in filled:
        zeros = np.zeros(tensor.shape, str(tensor.dtype).rpartition(".")[2])
        tensor.get_tensor().set(zeros, paddle.CPUPlace())
    try:
        yield
    finally:
        release(filled)


def release(tensors: Iterable[Tensor]) -> None:
    """Frees the memory of tensors, which keep their shapes."""
    for tensor in tensors:
        if has_memory(tensor):
            release_memory(tensor)


def initialize(model: Layer, parameters: Mapping[str, Tensor]) -> None:
    """Allocates and initializes parameters that were made under ``paddle.LazyGuard``.

    The seed of a parameter is its index in the whole model, so that its value does not depend on
    which parameters a rank has.

    Args:
        model: The whole model.
        parameters: By name, the parameters to initialize; those with memory stay unchanged.
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
    state = sum(spec_of(tensor).nbytes for tensor in model.state_dict().values())
    activations = sum(spec.nbytes for spec in trace.specs if math.prod(spec.shape))
    return _COPIES * state + 2 * activations


def bytes_for_each_process() -> int | None:
    """Returns the free bytes of the device, or of the host for each process; None if unknown."""
    if device_kind() == "gpu":
        return memory_limit() - process_bytes()
    free = _available_bytes()
    processes = int(os.environ.get("PADDLE_LOCAL_SIZE", meeting.world_size()))
    return None if free is None else free // max(processes, 1)


def _available_bytes() -> int | None:
    """Returns the free bytes of this host; None where /proc/meminfo does not have them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return next((1024 * size for size in kilobytes), None)


class CapturedState(ModelState):
    """The parameters and buffers of a captured model that this process has, and all their names.

    The fully qualified names are those of the plain model.
    """

    def __init__(
        self,
        part: Layer,
        slots: Sequence[Slot],
        stages: Mapping[str, Sequence[int]],
        nodes: Sequence[str],
        group: Callable[[], Group],
    ) -> None:
        """Stores which parameters and buffers the whole model has, and which this process has.

        Args:
            part: A layer with the sublayers and tensors of this process under their names in the
                whole model.
            slots: The names and shapes of the whole model's parameters and buffers.
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
        """Stores the current parameters: states have these, even if a script replaces one later."""
        self._parameters = {n: t for n, t in super()._named_tensors() if is_parameter(t)}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of this process by name: stored parameters, and current buffers."""
        # A script may replace a parameter, which is refused; it then saves the trained ones.
        stored = self._parameters
        current = {
            name: tensor
            for name, tensor in super()._named_tensors()
            if name in stored or not is_parameter(tensor)
        }
        return iter({**current, **stored}.items())

    def hidden_buffers(self) -> dict[str, Tensor]:
        """Returns an empty dict: a captured model has no buffers that its own names leave out."""
        return {}

    @property
    def spreads_experts(self) -> bool:
        """Whether ranks of a stage hold different experts: never in a captured model."""
        return False

    @property
    def adds_up_uses(self) -> bool:
        """Whether several stages use one weight, whose gradient each stage first sums by itself."""
        return any(len(users) > 1 for users in self._stages.values())

    def has_several_calls(self, name: str) -> bool:
        """Returns whether several stages use a parameter or buffer, by its name."""
        return len(self._stages[name]) > 1

    def stage_of(self, name: str) -> int | None:
        """Returns the first stage that uses a parameter or buffer."""
        return self._stages[name][0]

    def slots(self) -> list[Slot]:
        """Returns the names and shapes of the whole model's parameters and buffers."""
        return self._slots

    def positions(self) -> dict[str, int]:
        """Returns the index of each tensor in the plain model, by name."""
        return {slot.name: position for position, slot in enumerate(self._slots)}

    def outlines(self) -> list[str]:
        """Returns the tensors' names and shapes and the nodes, as texts that ranks compare."""
        return [*(f"{slot.name}{list(slot.shape)}" for slot in self._slots), *self._nodes]

    def _qualified_name(self, name: str) -> str:
        return name

    def _state_in(self, model: Layer) -> dict[str, Tensor]:
        """Returns the state of a model without buffers that its forward has registered."""
        state = super()._state_in(model).items()
        return {name: tensor for name, tensor in state if not self._is_late(name, tensor)}


def stages_using(
    model: Layer, nodes_of: Callable[[int], Sequence[Node]], stages: int
) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter or buffer of a model, by its name.

    A tensor that no node uses is in stage 0.

    Args:
        model: The model.
        nodes_of: Returns the nodes of a stage, in training and in evaluation.
        stages: The number of stages.
    """
    users: dict[int, list[int]] = {}
    for stage in range(stages):
        part = extract_used_layers(model, nodes_of(stage))
        for tensor in {id(t): t for t in part.state_dict().values()}.values():
            users.setdefault(id(tensor), []).append(stage)
    return {name: tuple(users.get(id(tensor), (0,))) for name, tensor in model.state_dict().items()}


def extract_used_layers(model: Layer, nodes: Sequence[Node], more: Collection[int] = ()) -> Layer:
    """Returns a Layer with the tensors and sublayers that nodes use, under the model's names.

    Args:
        model: The model, which is not changed.
        nodes: The nodes.
        more: The ids of further parameters and buffers that the Layer has.
    """
    layers = {id(node.function) for node in nodes if node.is_layer}
    tensors = {id(ref.tensor) for node in nodes for ref in node.state_refs}
    return _extract_part(model, layers, tensors.union(more))


def _extract_part(layer: Layer, layers: set[int], tensors: set[int]) -> Layer:
    """Returns a Layer with the sublayers and tensors of ``layer`` that nodes use.

    The nodes call the layers, and take the tensors, that have the given ids. If the nodes use all
    that ``layer`` has, the result is ``layer``.
    """
    part = paddle.nn.Layer()
    uses_all = True
    for name, sublayer in sublayers_in(layer).items():
        if sublayer is None:
            continue
        used = sublayer if id(sublayer) in layers else _extract_part(sublayer, layers, tensors)
        has_tensors = any(True for _ in chain(sublayer.parameters(), sublayer.buffers()))
        uses_all = uses_all and (used is sublayer or not has_tensors)
        if used is sublayer or any(getattr(used, table) for table in TABLES):
            sublayers_in(part)[name] = used
    # Not by add_parameter, which refuses a name that Layer has itself.
    for table_of in (parameters_in, buffers_in):
        for name, tensor in table_of(layer).items():
            if tensor is not None and id(tensor) in tensors:
                table_of(part)[name] = tensor
            uses_all = uses_all and (tensor is None or name in table_of(part))
    if uses_all and any(getattr(part, table) for table in TABLES):
        return layer
    copy_unsaved_names(layer, part)
    return part


def files_of_model(
    slots: Sequence[Slot],
    users: Mapping[str, Sequence[int]],
    tensors: Mapping[str, Tensor],
    stages: Collection[int],
    placement: Placement,
    job: Job | None,
    group: Callable[[], Group],
) -> LayerFiles:
    """Returns Fleet's files of a captured model: a file for each layer that has tensors.

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
    layer_of_file: dict[LayerFile, Layer | LayerInParts] = {}
    for number, (path, names) in enumerate(layers.items()):
        if path in in_parts:
            layer_of_file[LayerFile(number)] = LayerInParts(in_parts[path], group)
            continue
        if len({sources[name] for name in names}) > 1:
            raise ConfigError(
                "the parameters of a layer are on several ranks: Fleet has one file for it",
                where=path,
                cause="operations in several stages take them one by one",
                fix="write pipe.full_state_dict() by paddle.save, or cut elsewhere",
            )
        if users[names[0]][0] in stages:
            layer_of_file[LayerFile(number)] = layer = paddle.nn.Layer()
            parameters_in(layer).update((name, tensors[name]) for name in names)
    return LayerFiles(layer_of_file, layer_of_file, sources, job)

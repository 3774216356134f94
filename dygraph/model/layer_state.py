"""What a ``PipelineLayer`` tells, saves and loads of its parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.dygraph import tensor_parallel
from fleetpipe.dygraph.layers import tied
from fleetpipe.dygraph.state import files
from fleetpipe.dygraph.state.hidden_buffers import hidden_buffers
from fleetpipe.dygraph.state.names import Slot
from fleetpipe.dygraph.state.single_model import SingleModel
from fleetpipe.dygraph.state.tied_weights import SharedWeights, SharingGroup
from fleetpipe.dygraph.state.whole_state import ModelState
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.partition import Partition
from fleetpipe.schedules import Placement
from fleetpipe.transport import Group, SoleGroup


class StatefulLayers(paddle.nn.Layer):
    """The part of ``PipelineLayer`` that has to do with state."""

    placement: Placement
    partition: Partition
    _layers_desc: Sequence[Any]
    _functions: Mapping[int, Callable[[Any], Any]]
    _job: Job | None
    _shared: Mapping[int, tied.SharedLayer]
    _shared_weights: SharedWeights
    _state: ModelState

    def outlines(self) -> list[str]:
        """Returns the name of each layer of the whole model with its parameters' shapes."""
        return self._state.outlines()

    def slots(self) -> list[Slot]:
        """Returns the names and shapes of the parameters and buffers of the whole model."""
        return self._state.slots()

    def own_state(self) -> dict[str, Any]:
        """Returns this process's parameters and buffers by their names in the whole model.

        These are the keys of :meth:`full_state_dict`. In ``state_dict`` the weight of a second
        class of a shared key has Fleet's name instead, which depends on the rank.
        """
        return self._state.own()

    @property
    def adds_up_uses(self) -> bool:
        """Whether several stages use one weight: its gradient is added up stage by stage."""
        stages: dict[str, set[int]] = {}
        for index, layer in self._shared.items():
            stages.setdefault(layer.key, set()).add(self.partition.stage_of(index))
        return any(len(users) > 1 for users in stages.values())

    def own_parameters(self) -> dict[str, Any]:
        """Returns the parameters among :meth:`own_state`, the shared first."""
        return {self._state.own_name(name): p for name, p in self.named_parameters()}

    def hidden_buffers(self) -> dict[str, Any]:
        """Returns the buffers of this process's layers that no state dict has.

        They go by the number of their layer in the whole list, ``3.mask``.
        """
        places = hidden_buffers(self._functions)
        return {name: holder[key] for name, (holder, key) in places.items()}

    def load_from(self, source: Any) -> None:
        """Takes this process's parameters and buffers from a single-device model.

        Args:
            source: The model or its state dict. Names such as ``3.weight`` are matched by name;
                a model with other names by order, in which shapes must agree.

        Raises:
            CheckpointError: The source does not fit; nothing was changed.
        """
        self._state.load(source)

    def full_state_dict(self) -> dict[str, Any]:
        """Returns copies of all parameters and buffers of the whole model, on every rank.

        Collective over the pipeline. The keys are those of :meth:`own_state` on all ranks, each
        once; shared layers come first.
        """
        return self._state.gather(self._group())

    def copy_to(self, model: Any) -> None:
        """Puts the whole pipeline's parameters and buffers into a single-device model.

        Collective over the pipeline; the inverse of :meth:`load_from`.

        Args:
            model: A Layer with the same parameters in the same order; may be another on each rank.

        Raises:
            CheckpointError: The model does not fit; nothing was changed.
        """
        self._state.copy_to(model, self._group())

    def names_in(self, model: Any) -> dict[str, str]:
        """Returns this pipeline's name of each parameter and buffer of a single-device model.

        Raises:
            CheckpointError: The model does not fit in names, or in order and shape.
        """
        return self._state.names_in(model)

    def single_model(self) -> SingleModel:
        """Builds the whole list of layers in this process as one Layer, with fresh weights."""
        entries = dict(enumerate(self._layers_desc))
        ready = {i: e for i, e in entries.items() if not hasattr(e, "build_layer")}
        tensor_parallel.refuse_slices(ready)
        entries.update(copy.deepcopy(ready))
        shared = tuple({layer.indices: layer for layer in self._shared.values()}.values())
        with tensor_parallel.alone():
            return SingleModel(tied.build([*entries.values()], entries, shared))

    def save_state_dict(self, path: str | Path) -> None:
        """Writes each layer of this process to a file of its own, named as Fleet names them.

        Every rank calls it; those of the first replica write. A shared layer is written where an
        entry calls it without a ``forward_func``, or at its first entry if none does.

        Args:
            path: A folder, which is made where it does not exist.
        """
        if self._replica() == 0:
            layers = files.layers_to_write(self._functions, self._shared, self._layers_desc)
            places = {self._place(index): layer for index, layer in layers.items()}
            files.save(path, places, self._tensor_slice()[0])

    def set_state_dir(self, path: str | Path) -> None:
        """Reads the files of this process's layers, and makes shared weights equal again.

        Collective over the pipeline where weights are shared between ranks. The files may be
        Fleet's.

        Args:
            path: The folder given to :meth:`save_state_dict`.

        Raises:
            CheckpointError: The folder or a file is missing, or does not fit its layer; the layers
                of this rank are as they were.
            PipelineTimeout: Another rank did not come within the limit.
        """
        # Before anything that others hear of: a script may go on without a checkpoint.
        files.require_folder(path)
        at = {
            index: files.written_at(layer, self._layers_desc)
            for index, layer in self._shared.items()
        }
        layers = files.layers_to_write(self._functions, self._shared, self._layers_desc)
        places = {self._place(i): layer for i, layer in layers.items() if at.get(i, i) == i}
        sources: dict[str, int] = {}
        for index, layer in sorted(self._shared.items()):
            for name in layer.names.values():
                sources.setdefault(name, self._rank_of_layer(at[index]))
        guard = nullcontext() if self._job is None else self._job.guarded(lambda: "loading layers")
        with guard:
            files.load(path, places, *self._tensor_slice())
            self._shared_weights.equalize(sources)

    def _rank_of_layer(self, index: int) -> int:
        return self.placement.rank_of(self.partition.stage_of(index))

    def _group(self) -> Group:
        """Returns the ranks that hold the stages of this model."""
        return SoleGroup() if self._job is None else self._job.group()

    def _sharing_group(self, members: tuple[int, ...]) -> SharingGroup:
        """Returns some ranks of the pipeline as a group."""
        if self._job is None:
            raise ConfigError("outside of a job no rank has a copy of another's weights")
        (transport,) = self._job.connect().values()
        return SharingGroup(transport, members, self._job.timeout)

    def _place(self, index: int) -> files.Place:
        if self.placement.chunks == 1:
            return files.Place(index, None)
        stage = self.partition.stage_of(index)
        chunk = self.placement.stages_of(self.placement.rank_of(stage)).index(stage)
        return files.Place(index, chunk)

    def _replica(self) -> int:
        """Returns 0 in the processes that write: one for each layer and tensor-parallel slice."""
        if self._job is None:
            return int(paddle.distributed.get_rank())
        return self._job.replica

    def _tensor_slice(self) -> tuple[int, int]:
        """Returns this process's place among the tensor-parallel ranks, and their number."""
        if self._job is None:
            return 0, 1
        hcg = self._job.hcg
        return hcg.get_model_parallel_rank(), hcg.get_model_parallel_world_size()

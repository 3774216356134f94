"""Attributes and methods of Fleet's ``PipelineLayer`` for users; fleetpipe uses few of them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph.layers.entries import shared_attributes
from fleetpipe.dygraph.layers.run_stage import PipelineLayerChunk
from fleetpipe.dygraph.layers.tied import SharedLayer
from fleetpipe.dygraph.model.owned_stages import OwnedStages
from fleetpipe.dygraph.random_keys import alike_in_apply
from fleetpipe.dygraph.state.model_on_ranks import ModelOnRanks
from fleetpipe.dygraph.state.tied_weights import sharing_group
from fleetpipe.errors import ConfigError, StateError, UsageError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_id
from fleetpipe.paddle_api.layer import parameters_in
from fleetpipe.partition import Partition
from fleetpipe.schedules import Placement

#: Methods that only the wrapper of a model has.
_OF_THE_WRAPPER = ("train_batch", "eval_batch", "predict_batch", "forward_backward_pipeline")


class NotWrapped(UsageError, AttributeError):
    """A ``PipelineLayer`` was asked for a method of the wrapped model, such as ``train_batch``.

    It is an AttributeError, so that ``hasattr`` returns False.
    """


def require_chunk(number: int, chunks: int) -> None:
    """Refuses the number of a chunk that a process does not have.

    Args:
        number: The number of the chunk.
        chunks: The number of chunks of the process; 0 if each rank has one chunk.
    """
    if number not in range(chunks):
        raise ConfigError(
            f"there is no chunk {number}",
            expected=f"a number from 0 to {chunks - 1}"
            if chunks
            else "no chunk_id: each rank has one chunk",
            fix="pass the number of a chunk of this rank" if chunks else "leave chunk_id out",
        )


class FleetFace(ModelOnRanks):
    """The members of Fleet's ``PipelineLayer`` that users read and call beside training.

    Attributes:
        layers: The list of layers as the user gave it.
        segment_parts: The first layer of each stage, then the number of layers.
        run_function: The built layers and functions of this process, in order.
        shared_comm: The shared layers of which other ranks have copies, by key. Each entry has the
            ``ranks`` of the job, the ``group`` in the pipeline, the names ``weight_attr`` of the
            weights, and the ``layer``.
        device_id: This process's device.
        global_rank: This process's rank in the job.
    """

    placement: Placement
    partition: Partition
    owned_stages: OwnedStages
    _layers_desc: list[Any]
    _owned: Sequence[int]

    @abstractmethod
    def follow(self) -> None:
        """Makes the stages run the layers that the script has put in the place of others."""

    def _set_fleet_attributes(
        self, shared: Mapping[int, SharedLayer], layers: Mapping[str, Layer]
    ) -> None:
        """Sets the attributes that users of Fleet's class read.

        Args:
            shared: The shared layers, by each of their numbers in the list.
            layers: The shared layers of this process, by their paths in the model.
        """
        stages = [self.partition.range_of(stage) for stage in self._owned]
        self.layers = self._layers_desc
        self._num_layers = len(self._layers_desc)
        self._num_virtual_pipeline_stages = self.placement.chunks
        self.segment_parts = list(self.partition.boundaries)
        self._start_poss = [layers.start for layers in stages]
        self._end_poss = [layers.stop for layers in stages]
        self._start_pos, self._end_pos = self._start_poss[0], self._end_poss[-1]
        self.device_id = device_id()
        self.global_rank = paddle.distributed.get_rank()
        self._list_functions(shared)
        self.shared_comm = self._describe_sharing(shared, layers)

    def _describe_sharing(
        self, shared: Mapping[int, SharedLayer], layers: Mapping[str, Layer]
    ) -> dict[str, dict[str, Any]]:
        """Describes for ``shared_comm`` the shared layers of which other ranks have copies.

        The arguments are those of :meth:`_set_fleet_attributes`.
        """
        groups = {}
        for path, layer in layers.items():
            weights = (w for w in self.shared_weights if w.name.startswith(f"{path}."))
            members = sorted({rank for weight in weights for rank in weight.holders})
            if self._job is not None and members:
                first = min(index for index, candidate in shared.items() if candidate.path == path)
                groups[shared[first].key] = {
                    "ranks": [self._job.hcg.get_rank_from_stage(rank) for rank in members],
                    "group": sharing_group(self._job, members),
                    "weight_attr": list(shared_attributes(self._layers_desc[first])),
                    "layer": layer,
                }
        return groups

    def _list_functions(self, shared: Mapping[int, SharedLayer]) -> None:
        """Sets the chunks and ``run_function``, in which users of Fleet look for layers.

        Args:
            shared: The shared layers, by each of their numbers.
        """
        keys = {index: layer.key for index, layer in shared.items()}
        self._model_chunks = [
            PipelineLayerChunk(self.owned_stages.layers(stage), keys)
            for stage in (self._owned if self.placement.chunks > 1 else ())
        ]
        self._list_as_run_function(self.owned_stages.functions.values())

    def _list_as_run_function(self, functions: Iterable[Callable[..., Nest]]) -> None:
        """Sets ``run_function`` to a list of ``functions``."""
        self._functions_in_list = tuple(functions)
        self.run_function = list(self._functions_in_list)

    def __getattr__(self, name: str) -> Any:
        """Returns a parameter, a buffer or a sublayer, as ``nn.Layer`` does.

        Raises:
            NotWrapped: It is a method of the wrapper that ``fleet.distributed_model`` returns.
        """
        if name in _OF_THE_WRAPPER:
            raise NotWrapped(
                f"a PipelineLayer has no {name} before it is wrapped",
                got=f"{type(self).__name__}.{name}",
                cause="the model did not go through fleet.distributed_model, or what that returned "
                "was not kept",
                fix="model = fleet.distributed_model(model), after fleet.init",
            )
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses to pickle the pipeline.

        Raises:
            StateError: Always.
        """
        raise StateError(
            "a pipeline is not pickled",
            cause="it belongs to the job of this process",
            fix="to store weights, use full_state_dict() or fleetpipe.CheckpointManager",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FleetFace:
        """Returns a copy of the layers in the same job."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def apply(self, fn: Callable[[Layer], object]) -> FleetFace:
        """Calls a function for each layer of this process, as ``nn.Layer.apply`` does.

        The random numbers that it draws for a layer depend only on the script's seed and on the
        name of the layer's first parameter in the whole model, not on the rank.
        """
        names = {id(parameter): name for name, parameter in self.state.own_parameters().items()}
        paths = {id(layer): path for path, layer in self.named_sublayers(include_self=True)}

        def name_of(layer: Layer) -> str:
            in_order = (names.get(id(parameter)) for parameter in parameters_in(layer).values())
            return next(filter(None, in_order), paths.get(id(layer), ""))

        super().apply(alike_in_apply(name_of, fn))
        return self

    def get_stage_from_index(self, layer_idx: int) -> int:
        """Returns the pipeline rank that owns layer ``layer_idx`` of the whole list."""
        return self.placement.rank_of(self.partition.stage_of(layer_idx))

    def get_num_virtual_stages(self) -> int:
        """Returns the number of chunks on each rank."""
        return self.placement.chunks

    def get_model_chunks(self) -> list[PipelineLayerChunk] | None:
        """Returns the chunks of this process in the order of the model; None if v is 1.

        A rank has v chunks; a process that plays all ranks has all p * v chunks.
        """
        return self._model_chunks or None

    def forward_function(self, start: int, end: int) -> Callable[..., Nest]:
        """Returns a function that runs ``run_function[start:end]``, without recompute.

        Args:
            start: The index of the first layer in ``run_function``.
            end: The index after the last layer in ``run_function``.
        """
        functions = self.run_function[start:end]

        def run(*inputs: Nest) -> Nest:
            """Calls the functions one after another, the first with the inputs."""
            value: Nest = inputs[0] if len(inputs) == 1 else inputs
            for function in functions:
                value = function(value)
            return value

        return run

    def update_run_function(self, chunk_id: int | None) -> None:
        """Makes ``run_function`` list the layers of one chunk; None changes nothing.

        Raises:
            ConfigError: There is no such chunk.
        """
        self.follow()
        if chunk_id is not None:
            require_chunk(chunk_id, len(self._model_chunks))
            self._list_as_run_function(self._model_chunks[chunk_id].get_run_function())

    def get_schedule_chunk(self, *_arguments: Any) -> NoReturn:
        """Refuses Fleet's schedule nodes, which only Fleet's overlapped schedulers use."""
        raise ConfigError(
            "fleetpipe's engine needs no schedule nodes",
            fix="choose a schedule with pipeline_configs['schedule_mode'], DualPipeV for instance",
        )

    build_schedule_nodes = get_schedule_chunk

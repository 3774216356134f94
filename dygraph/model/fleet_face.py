"""The attributes and small methods of Fleet's ``PipelineLayer`` that users and tests read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fleetpipe._paddle import paddle
from fleetpipe.dygraph._paddle import device_id
from fleetpipe.dygraph.layers.chunk import PipelineLayerChunk
from fleetpipe.dygraph.layers.entries import shared_attributes
from fleetpipe.dygraph.layers.tied import HOLDER
from fleetpipe.dygraph.model.layer_state import StatefulLayers
from fleetpipe.errors import ConfigError, UsageError

_OF_THE_WRAPPER = ("train_batch", "eval_batch", "predict_batch", "forward_backward_pipeline")


class NotWrapped(UsageError, AttributeError):
    """A ``PipelineLayer`` was asked to do what its wrapper does; ``hasattr`` is False for it."""


class FleetLayers(StatefulLayers):
    """The part of ``PipelineLayer`` that is there for scripts written for Fleet's.

    Attributes:
        layers: The list of layers as the user gave it.
        segment_parts: First layer of each stage, then the number of layers.
        run_function: The built layers and functions of this process, in order.
        shared_comm: By key, the shared layers of which other ranks have copies: ``ranks`` of the
            job, the ``group`` in the pipeline, the names of ``weight_attr`` and the ``layer``.
        device_id: This process's device.
        global_rank: This process's rank in the job.
    """

    _owned: Sequence[int]

    def __getattr__(self, name: str) -> Any:
        """Returns a parameter, a buffer or a sublayer, as ``nn.Layer`` does.

        Raises:
            NotWrapped: It is a method of what ``fleet.distributed_model`` returns.
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

    def stage_layers(self, stage: int) -> dict[int, Callable[[Any], Any]]:
        """Returns the built layers and functions of a stage of this process, by their numbers."""
        return {index: self._functions[index] for index in self._range(stage)}

    def _range(self, stage: int) -> range:
        return range(*self.partition.boundaries[stage : stage + 2])

    def _tell_as_fleet(self) -> None:
        """Sets the attributes that users of Fleet's class read."""
        starts = [self._range(stage).start for stage in self._owned]
        ends = [self._range(stage).stop for stage in self._owned]
        self.layers = self._layers_desc
        self._num_layers = len(self._layers_desc)
        self._num_virtual_pipeline_stages = self.placement.chunks
        self.segment_parts = list(self.partition.boundaries)
        self._start_poss, self._end_poss = starts, ends
        self._start_pos, self._end_pos = starts[0], ends[-1]
        self.device_id = device_id()
        self.global_rank = paddle.distributed.get_rank()
        self.run_function = list(self._functions.values())
        self._model_chunks = [
            PipelineLayerChunk(
                self.stage_layers(stage), {i: layer.key for i, layer in self._shared.items()}
            )
            for stage in (self._owned if self.placement.chunks > 1 else ())
        ]
        self.shared_comm = {
            key: comm for key in self.shared_layers for comm in [self._communication(key)] if comm
        }

    def _communication(self, key: str) -> dict[str, Any]:
        """Returns what Fleet tells of a shared layer with copies on other ranks, else nothing."""
        names = f"{HOLDER}.{key}."
        weights = [w for w in self._shared_weights.weights if w.name.startswith(names)]
        if self._job is None or not weights:
            return {}
        members = tuple(sorted({rank for weight in weights for rank in weight.holders}))
        first = min(index for index, layer in self._shared.items() if layer.key == key)
        return {
            "ranks": [self._job.hcg.get_rank_from_stage(rank) for rank in members],
            "group": self._sharing_group(members),
            "weight_attr": list(shared_attributes(self._layers_desc[first])),
            "layer": self.shared_layers[key],
        }

    def get_num_virtual_stages(self) -> int:
        """Returns the number of chunks on each rank."""
        return self.placement.chunks

    def get_model_chunks(self) -> list[PipelineLayerChunk] | None:
        """Returns the chunks of this process in the order of the model, None where v is 1.

        A rank has v chunks; a process that plays all ranks has all p * v of them.
        """
        return self._model_chunks or None

    def forward_function(self, start: int, end: int) -> Callable[..., Any]:
        """Returns a function that runs a part of ``run_function``, without recomputing.

        Args:
            start: The place of its first layer in ``run_function``.
            end: The place after its last.
        """
        functions = self.run_function[start:end]

        def run(*inputs: Any) -> Any:
            value: Any = inputs[0] if len(inputs) == 1 else inputs
            for function in functions:
                value = function(value)
            return value

        return run

    def update_run_function(self, chunk_id: int | None) -> None:
        """Makes ``run_function`` the layers of one chunk; None leaves it as it is.

        Raises:
            ConfigError: There is no such chunk.
        """
        if chunk_id is not None:
            self._require_chunk(chunk_id)
            self.run_function = self._model_chunks[chunk_id].get_run_function()

    def get_schedule_chunk(self, chunk_id: int) -> NoReturn:
        """Refuses Fleet's schedule nodes, which exist for its own overlapped schedulers.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "fleetpipe's engine needs no schedule nodes",
            fix="choose a schedule with pipeline_configs['schedule_mode'], DualPipeV for instance",
        )

    def build_schedule_nodes(self, start: int, end: int) -> NoReturn:
        """Refuses as :meth:`get_schedule_chunk` does.

        Raises:
            ConfigError: Always.
        """
        self.get_schedule_chunk(start)

    def _require_chunk(self, chunk_id: int) -> None:
        chunks = len(self._model_chunks)
        if chunk_id not in range(chunks):
            raise ConfigError(
                f"there is no chunk {chunk_id}",
                expected=f"a number from 0 to {chunks - 1}"
                if chunks
                else "no chunk_id: each rank has one chunk",
            )

"""A model as a list of layers, of which a process builds the ones of its own stages.

``PipelineLayer`` has the constructor and the attributes of Fleet's. Layers keep their number in
the whole list as their name, so that a parameter is called ``3.weight`` on whatever rank and stage
it lives.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from fleetpipe._paddle import paddle, user_strategy
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph import arrangement, descriptions
from fleetpipe.dygraph.chunk import PipelineLayerChunk
from fleetpipe.dygraph.running import StageRunner
from fleetpipe.dygraph.whole_model import (
    SingleModel,
    Slot,
    names_in,
    slots_of,
    to_pipeline_names,
)
from fleetpipe.errors import ConfigError
from fleetpipe.job import current_job, pipeline_group
from fleetpipe.partition import LayerInfo, Partition, segment
from fleetpipe.schedules import Placement, Schedule


class PipelineLayer(paddle.nn.Layer):
    """The stages of a pipeline that this process owns: its own one, or all in one process."""

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Any = None,
        seg_method: str | Sequence[int] = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: Any = None,
        num_virtual_pipeline_stages: int | None = None,
        use_cudagraph: bool = False,
        use_dualpipev: bool = False,
    ) -> None:
        """Cuts ``layers`` into stages and builds the ones of this process.

        Before layer i is built the random seed is set to 1234 + i, as Fleet does, and the random
        state is put back afterwards: initial weights depend neither on the user's seed nor on
        the cut.

        Args:
            layers: ``LayerDesc``, built ``nn.Layer`` or callables, in the order of the model. Each
                is called with one argument, the output of the one before.
            num_stages: Number of pipeline ranks; may be left out where ``topology`` is given.
            topology: ``hcg.topology()``; its pipe axis gives the number of ranks.
            loss_fn: ``loss_fn(output, label)`` gives a Tensor with one element.
            seg_method: ``"uniform"``, ``"layer:Regex"``, ``"balanced"`` (by parameters) or the
                list of first layers of the stages.
            recompute_interval: Not part of this version; must be 0.
            recompute_ctx: Accepted for Fleet's sake.
            num_virtual_pipeline_stages: Chunks on each rank, v. Left out, it is the schedule's own
                number: 2 for Interleaved1F1B and on a vee (ZBV, VHalf, VMin, DualPipeV), else 1.
            use_cudagraph: Accepted without effect.
            use_dualpipev: Means the schedule DualPipeV.

        Raises:
            ConfigError: The number of stages is not given, or does not fit the job; or the schedule
                of the job's strategy cannot have that number of chunks.
            PartitionError: The layers cannot be cut as asked.
        """
        super().__init__()
        _refuse_later_features(recompute_interval)
        self._layers_desc = list(layers)
        for index, entry in enumerate(self._layers_desc):
            descriptions.check(entry, index)
        self._loss_fn = loss_fn if loss_fn is None or isinstance(loss_fn, list) else [loss_fn]
        self._topo = topology
        self._num_stages = _number_of_stages(num_stages, topology)
        self.recompute_ctx = recompute_ctx
        self.use_cudagraph = use_cudagraph
        self._chunks = num_virtual_pipeline_stages
        self._use_dualpipev = use_dualpipev
        self.placement = self._arranged(_current_config()).placement
        self.partition = self._cut(seg_method)
        self.segment_parts = list(self.partition.boundaries)
        self._stage_id, self._owned = self._own_stages()
        self._functions: dict[int, Callable[[Any], Any]] = {}
        for stage in self._owned:
            self._build(range(*self._range(stage)))
        self._runner = StageRunner(self._functions, self.partition)

    def schedule(self, config: PipelineConfig) -> Schedule:
        """Returns the schedule that runs these layers, verified against the memory cap.

        Args:
            config: The options; its schedule must place the layers as they were placed when the
                model was built.

        Raises:
            ConfigError: The schedule needs another placement, or cannot be built.
            ScheduleError: The schedule passes the memory cap.
        """
        schedule = self._arranged(config)
        if schedule.placement != self.placement:
            raise ConfigError(
                f"the schedule {schedule.name} does not run on layers placed like these",
                expected=_told(schedule.placement),
                got=_told(self.placement),
                cause="the strategy was another when the PipelineLayer was built",
                fix="set schedule_mode, and call fleet.init, before you build the PipelineLayer",
            )
        return schedule

    def _arranged(self, config: PipelineConfig) -> Schedule:
        if self._use_dualpipev:
            config = arrangement.dualpipev(config, self._chunks)
        return arrangement.arranged(config, self._num_stages, self._chunks)

    def _cut(self, method: str | Sequence[int]) -> Partition:
        layers = self._layer_infos() if method == "balanced" else [
            LayerInfo(descriptions.class_name(entry)) for entry in self._layers_desc
        ]
        return segment(layers, self.placement.stages, method)

    def _layer_infos(self) -> list[LayerInfo]:
        return [
            LayerInfo(descriptions.class_name(entry), descriptions.count_parameters(layer))
            for entry, layer in zip(self._layers_desc, self._blueprints)
        ]

    @functools.cached_property
    def _blueprints(self) -> list[Any]:
        return [descriptions.blueprint(entry, i) for i, entry in enumerate(self._layers_desc)]

    def _own_stages(self) -> tuple[int, tuple[int, ...]]:
        """Returns this process's rank in the pipeline and the stages it owns."""
        job = current_job()
        if job is None or job.local:
            return 0, tuple(range(self.placement.stages))
        rank = job.hcg.get_stage_id()
        return rank, self.placement.stages_of(rank)

    def _range(self, stage: int) -> tuple[int, int]:
        return self.segment_parts[stage], self.segment_parts[stage + 1]

    def _build(self, indices: Iterable[int]) -> None:
        for index in indices:
            entry = self._layers_desc[index]
            built = descriptions.build(entry, index)
            if isinstance(built, paddle.nn.Layer):
                self.add_sublayer(str(index), built)
            self._functions[index] = built

    def stage_layers(self, stage: int) -> dict[int, Callable[[Any], Any]]:
        """Returns the built layers and functions of a stage of this process, by their numbers."""
        return {index: self._functions[index] for index in range(*self._range(stage))}

    def run_stage(self, stage: int, value: Any, micro_batch: int | None = None) -> Any:
        """Runs the layers of ``stage`` one after another.

        Args:
            stage: A global stage of this process.
            value: What the first layer takes: a Tensor, or nested tuples, lists, dicts of them.
            micro_batch: The global micro-batch in a run of a plan; None in a direct call.

        Raises:
            BoundaryError: The first layer cannot take what the stage before sent.
        """
        return self._runner.run(stage, value, micro_batch)

    def forward(self, input: Any, chunk_id: int | None = None) -> Any:
        """Runs the layers of this process in order; the whole model in one process.

        Under a vee placement a rank's two chunks are not neighbours: name one.

        Args:
            input: What the first of the layers takes.
            chunk_id: Runs this chunk alone: a number in :meth:`get_model_chunks`.

        Raises:
            ConfigError: There is no such chunk.
        """
        if chunk_id is None:
            for stage in self._owned:
                input = self.run_stage(stage, input)
            return input
        chunks = len(self._owned) if self.placement.chunks > 1 else 0
        if chunk_id not in range(chunks):
            raise ConfigError(
                f"there is no chunk {chunk_id}",
                expected=f"a number from 0 to {chunks - 1}"
                if chunks
                else "no chunk_id: each rank has one chunk",
            )
        return self.run_stage(self._owned[chunk_id], input)

    def loss_fn(self, index: int = 0) -> Callable[[Any, Any], Any]:
        """Returns the loss function.

        Raises:
            ConfigError: The model was built without one.
        """
        if not self._loss_fn:
            raise ConfigError(
                "this PipelineLayer has no loss function", fix="pass loss_fn= when you build it"
            )
        chosen: Callable[[Any, Any], Any] = self._loss_fn[index]
        return chosen

    def get_num_virtual_stages(self) -> int:
        """Returns the number of chunks on each rank."""
        return self.placement.chunks

    def get_model_chunks(self) -> list[PipelineLayerChunk] | None:
        """Returns the chunks of this process in the order of the model, None where v is 1.

        A rank has v chunks; a process that plays all ranks has all p * v of them.
        """
        if self.placement.chunks == 1:
            return None
        return [PipelineLayerChunk(self.stage_layers(stage)) for stage in self._owned]

    def get_stage_from_index(self, layer_idx: int) -> int:
        """Returns the pipeline rank that owns layer ``layer_idx`` of the whole list."""
        return self.placement.rank_of(self.partition.stage_of(layer_idx))

    def stage_table(self) -> str:
        """Returns a table of all stages: rank, layers, parameters. Any rank alone can print it."""
        counted = Partition(
            self.partition.boundaries, self.partition.method, tuple(self._layer_infos())
        )
        return counted.table(self.placement.rank_of)

    def outlines(self) -> list[str]:
        """Returns the name of each layer of the whole model with its parameters' shapes."""
        outlines = []
        for index, (entry, layer) in enumerate(zip(self._layers_desc, self._blueprints)):
            held = [f"{slot.name}{list(slot.shape)}" for slot in slots_of(layer, index)]
            outlines.append(" ".join([descriptions.class_name(entry), *held]))
        return outlines

    def slots(self) -> list[Slot]:
        """Returns the names and shapes of the parameters and buffers of the whole model."""
        return [slot for i, layer in enumerate(self._blueprints) for slot in slots_of(layer, i)]

    def load_from(self, source: Any) -> None:
        """Takes this process's parameters and buffers from a single-device model.

        Args:
            source: The model or its state dict. Names such as ``3.weight`` are matched by name;
                a model with other names by order, in which shapes must agree.

        Raises:
            CheckpointError: The source does not fit; nothing was changed.
        """
        state = to_pipeline_names(self.slots(), source)
        for name, tensor in self.state_dict().items():
            tensor.set_value(state[name])

    def full_state_dict(self) -> dict[str, Any]:
        """Returns copies of all parameters and buffers of the whole model, on every rank.

        Collective over the pipeline. The keys are those of :meth:`state_dict`.
        """
        own = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        parts = pipeline_group().all_gather(own)
        merged = {name: tensor for part in parts for name, tensor in part.items()}
        return {slot.name: merged[slot.name] for slot in self.slots()}

    def copy_to(self, model: Any) -> None:
        """Puts the whole pipeline's parameters and buffers into a single-device model.

        Collective over the pipeline; the inverse of :meth:`load_from`.

        Args:
            model: A Layer with the same parameters in the same order; may be another on each rank.

        Raises:
            CheckpointError: The model does not fit; nothing was changed.
        """
        names = self.names_in(model)
        state = self.full_state_dict()
        for name, tensor in model.state_dict().items():
            tensor.set_value(state[names[name]])

    def names_in(self, model: Any) -> dict[str, str]:
        """Returns this pipeline's name of each parameter and buffer of a single-device model.

        Raises:
            CheckpointError: The model does not fit in names, or in order and shape.
        """
        return names_in(self.slots(), model)

    def single_model(self) -> SingleModel:
        """Builds the whole list of layers in this process as one Layer, with fresh weights."""
        return SingleModel(
            [copy.deepcopy(descriptions.build(e, i)) for i, e in enumerate(self._layers_desc)]
        )


def _number_of_stages(num_stages: int | None, topology: Any) -> int:
    """Returns the number of pipeline ranks, checked against the topology and the job."""
    if topology is None and num_stages is None:
        raise ConfigError(
            "PipelineLayer needs num_stages or topology",
            fix="pass topology=fleet.get_hybrid_communicate_group().topology()",
        )
    job = current_job()
    known = {
        "num_stages": num_stages,
        "topology": None if topology is None else topology.get_dim("pipe"),
        "pp_degree of fleet.init": None if job is None else job.degrees.pp,
    }
    given = {name: value for name, value in known.items() if value is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(
            "the number of pipeline stages is given twice, and differs",
            got=", ".join(f"{name}={value}" for name, value in given.items()),
            fix="pass only topology=fleet.get_hybrid_communicate_group().topology()",
        )
    return int(next(iter(given.values())))


def _current_config() -> PipelineConfig:
    """Returns the options of the current job; without a job the defaults."""
    if current_job() is None:
        return PipelineConfig()
    return PipelineConfig.from_strategy(user_strategy())


def _told(placement: Placement) -> str:
    return f"a {placement.name} of {placement.ranks} ranks with {placement.chunks} chunks on each"


def _refuse_later_features(recompute_interval: int) -> None:
    if recompute_interval != 0:
        raise ConfigError("this version does not run PipelineLayer(recompute_interval=..)")

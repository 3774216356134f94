"""A model as a list of layers, of which a process builds the ones of its own stages.

``PipelineLayer`` has the constructor and the attributes of Fleet's. Layers keep their number in
the whole list as their name, so that a parameter is called ``3.weight`` on whatever rank and stage
it lives; a layer that several entries share is called ``shared_layers.<key>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

from fleetpipe._paddle import paddle, user_strategy
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph import arrangement
from fleetpipe.dygraph._paddle import LOSS_FUNCTIONS_ARE_A_LIST
from fleetpipe.dygraph.layers import entries, tied
from fleetpipe.dygraph.layers.run_stage import StageRunner, checked_interval
from fleetpipe.dygraph.model.fleet_face import FleetLayers
from fleetpipe.dygraph.model.stage_count import number_of_stages, topology_of
from fleetpipe.dygraph.state.tied_weights import SharedWeights, holders
from fleetpipe.dygraph.state.whole_state import ModelState
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.job.say_once import tell_once
from fleetpipe.partition import LayerInfo, Partition, segment
from fleetpipe.schedules import Placement, Schedule


class PipelineLayer(FleetLayers):
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
            loss_fn: ``loss_fn(output, label)`` gives a Tensor with one element; or a list of such.
            seg_method: ``"uniform"``, ``"layer:Regex"``, ``"balanced"`` (by parameters) or the
                list of first layers of the stages.
            recompute_interval: Layers within a stage whose activations are dropped together after
                forward, and computed again in backward; 0 keeps all.
            recompute_ctx: Needed with ``recompute_interval``, as in Fleet; what it says has no
                effect.
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
        self._layers_desc = entries.checked(layers)
        job = current_job()
        self._num_stages = number_of_stages(num_stages, topology, job)
        self._topo = topology_of(topology, self._num_stages, job)
        # With one stage in a job of several the whole model is here, and the others do not matter.
        self._job = job if job is not None and job.degrees.pp == self._num_stages else None
        # As Fleet keeps it. Around Layer.__setattr__, which would make a sublayer of a loss.
        _require_callable(loss_fn)
        self.__dict__["_loss_fn"] = _as_list(loss_fn) if LOSS_FUNCTIONS_ARE_A_LIST else loss_fn
        self._recompute_interval = checked_interval(recompute_interval, recompute_ctx)
        self.recompute_ctx = recompute_ctx
        self.use_cudagraph = use_cudagraph
        self._chunks = num_virtual_pipeline_stages
        self._use_dualpipev = use_dualpipev
        self._blueprints = entries.Blueprints(self._layers_desc)
        if job is not None and job.degrees.mp > 1:
            # Sizes that cannot be cut are refused on every rank, before any waits for another.
            list(self._blueprints)
        shared = tied.find(self._layers_desc, self._blueprints)
        self._shared = {index: layer for layer in shared for index in layer.indices}
        self.placement = self._arranged(_current_config()).placement
        self.partition = self._cut(seg_method)
        tied.refuse_split(self._layers_desc, self.get_stage_from_index)
        self._stage_id, self._owned = self._own_stages()
        built = self._build(shared)
        self._runner = StageRunner(self._functions, self.partition, self._recompute_interval)
        self._state = ModelState(
            self._layers_desc, self._blueprints, shared, built.names, self.state_dict
        )
        self._shared_weights = self._connect_copies(shared)
        self._tell_as_fleet()
        if job is not None and not job.local and not self.parameters():
            tell_once(
                f"the layers of rank {self._stage_id} of the pipeline have no parameters, and "
                "Paddle's optimizers take no empty list: cut elsewhere with seg_method",
                any_rank=True,
            )

    def schedule(self, config: PipelineConfig) -> Schedule:
        """Returns the schedule that runs these layers, verified against the memory cap.

        Args:
            config: The options; its schedule must place the layers as they were placed when the
                model was built.

        Raises:
            ConfigError: The schedule needs another placement, or cannot be built.
            ScheduleError: The schedule passes the memory cap.
        """
        job = current_job()
        if job is not None and job.degrees.pp != self._num_stages:
            raise ConfigError(
                "this PipelineLayer has another number of stages than the job",
                expected=f"pp_degree={job.degrees.pp}",
                got=f"{self._num_stages}: the whole model is in this process",
                fix="pass topology=fleet.get_hybrid_communicate_group().topology()",
            )
        schedule = self._arranged(config, self.placement.name)
        if schedule.placement != self.placement:
            raise ConfigError(
                f"the schedule {schedule.name} does not run on layers placed like these",
                expected=_told(schedule.placement),
                got=_told(self.placement),
                cause="the strategy was another when the PipelineLayer was built",
                fix="set schedule_mode, and call fleet.init, before you build the PipelineLayer",
            )
        return schedule

    def _arranged(self, config: PipelineConfig, placed: str | None = None) -> Schedule:
        if self._use_dualpipev:
            config = arrangement.dualpipev(config, self._chunks)
        return config.schedule_for(self._num_stages, self._chunks, placed=placed)

    def _cut(self, method: str | Sequence[int]) -> Partition:
        layers = (
            self._layer_infos()
            if method == "balanced"
            else [LayerInfo(entries.class_name(entry)) for entry in self._layers_desc]
        )
        return segment(layers, self.placement.stages, method)

    def _layer_infos(self) -> list[LayerInfo]:
        return [
            LayerInfo(entries.class_name(entry), entries.count_parameters(layer))
            for entry, layer in zip(self._layers_desc, self._blueprints)
        ]

    def _own_stages(self) -> tuple[int, tuple[int, ...]]:
        """Returns this process's rank in the pipeline and the stages it owns."""
        if self._job is None or self._job.local:
            return 0, tuple(range(self.placement.stages))
        rank = self._job.hcg.get_stage_id()
        return rank, self.placement.stages_of(rank)

    def _build(self, shared: Sequence[tied.SharedLayer]) -> tied.Built:
        """Builds the layers of this process's stages."""
        indices = [index for stage in self._owned for index in self._range(stage)]
        built = tied.build(self._layers_desc, indices, shared)
        built.register(self)
        self._functions = built.functions
        return built

    def _connect_copies(self, shared: Sequence[tied.SharedLayer]) -> SharedWeights:
        """Makes the copies of shared weights equal on all ranks. Collective over the pipeline."""
        job = self._job
        weights = holders(shared, self.get_stage_from_index)
        if job is None or job.local or all(len(weight.holders) == 1 for weight in weights):
            return SharedWeights([], {}, self._stage_id, self._sharing_group)
        copies = SharedWeights(weights, self._state.own(), self._stage_id, self._sharing_group)
        with job.guarded(lambda: "making shared weights equal"):
            job.connect()
            copies.equalize()
        return copies

    def allreduce_shared_weight_gradients(self) -> None:
        """Gives all copies of shared weights the sum of their gradients.

        Collective over the ranks of the pipeline that share one; nothing happens on the others, nor
        where one process has all uses. A copy without a gradient counts as zeros. ``train_batch``
        calls it.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        self._shared_weights.sum_gradients()

    def run_stage(self, stage: int, value: Any, micro_batch: int | None = None) -> Any:
        """Runs the layers of ``stage`` one after another: see ``StageRunner.run``."""
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
        self._require_chunk(chunk_id)
        return self.run_stage(self._owned[chunk_id], input)

    def loss_functions(self) -> list[Callable[[Any, Any], Any]]:
        """Returns the loss functions, mostly one.

        Raises:
            ConfigError: The model was built without one.
        """
        functions = _as_list(self._loss_fn)
        if not functions or None in functions:
            raise ConfigError(
                "this PipelineLayer has no loss function", fix="pass loss_fn= when you build it"
            )
        return functions

    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """Returns the first of :meth:`loss_functions`; raises as that does."""
        return self.loss_functions()[0]

    def loss_layers(self) -> list[Any]:
        """Returns the loss functions that are layers: no stage has their parameters and buffers."""
        return [f for f in _as_list(self._loss_fn) if isinstance(f, paddle.nn.Layer)]

    def trained_parameters(self) -> list[Any]:
        """Returns the parameters of this process's stages and of the losses, each once."""
        layers = [self, *self.loss_layers()]
        return list({id(p): p for layer in layers for p in layer.parameters()}.values())

    def get_stage_from_index(self, layer_idx: int) -> int:
        """Returns the pipeline rank that owns layer ``layer_idx`` of the whole list."""
        return self.placement.rank_of(self.partition.stage_of(layer_idx))

    def stage_table(self) -> str:
        """Returns a table of all stages: rank, layers, parameters. Any rank alone can print it."""
        counted = Partition(
            self.partition.boundaries, self.partition.method, tuple(self._layer_infos())
        )
        return counted.table(self.placement.rank_of)


def _require_callable(loss_fn: Any) -> None:
    """Refuses a loss that would fail in the first batch, on the last rank alone.

    Raises:
        ConfigError: One of the functions is a class, or cannot be called.
    """
    for function in _as_list(loss_fn):
        is_class = isinstance(function, type)
        if function is not None and (is_class or not callable(function)):
            raise ConfigError(
                "loss_fn is called with the model's output and the label",
                expected="a function or a built layer, or a list of these",
                got=f"the class {function.__name__}" if is_class else repr(function),
                fix=f"pass {function.__name__}()" if is_class else "pass nn.CrossEntropyLoss()",
            )


def _as_list(loss_fn: Any) -> list[Any]:
    return list(loss_fn) if isinstance(loss_fn, (list, tuple)) else [loss_fn]


def _current_config() -> PipelineConfig:
    """Returns the options of the current job; without a job the defaults."""
    if current_job() is None:
        return PipelineConfig()
    return PipelineConfig.from_strategy(user_strategy())


def _told(placement: Placement) -> str:
    return f"a {placement.name} of {placement.ranks} ranks with {placement.chunks} chunks on each"

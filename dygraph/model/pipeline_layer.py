"""``PipelineLayer``: a model as a list of layers. Each process builds the layers of its stages.

It has the constructor and the attributes of Fleet's class. The name of a layer is its number in the
whole list, so a parameter has the name ``3.weight`` on any rank and in any stage. A layer that
several entries share has the name ``shared_layers.<key>``.
"""

from __future__ import annotations

import functools
import operator
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpipe import log
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.backward.recompute import layers_in
from fleetpipe.dygraph.batch import losses
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.layers import entries, tied
from fleetpipe.dygraph.layers.run_stage import checked_interval, require_dynamic_graph
from fleetpipe.dygraph.model import owned_stages
from fleetpipe.dygraph.model.arrangement import (
    Arrangement,
    LayerPlan,
    choose_topology,
    cut,
    number_of_stages,
    own_stages,
)
from fleetpipe.dygraph.model.fleet_face import FleetFace, require_chunk
from fleetpipe.dygraph.model.hidden_uses import (
    HiddenUses,
    refuse_hooks,
    refuse_own_forward,
    refuse_unlisted,
    refuse_untied,
)
from fleetpipe.dygraph.model.owned_stages import OwnedStages
from fleetpipe.dygraph.state.names import ModelState
from fleetpipe.dygraph.state.single_model import single_model
from fleetpipe.dygraph.state.tied_weights import equal_copies, holders, refuse_sparse
from fleetpipe.dygraph.sums import Uses
from fleetpipe.engine.observer import BatchObserver
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.mesh.parts import ModelParts
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import parameters_in
from fleetpipe.paddle_api.meta_parallel import LOSS_FUNCTIONS_ARE_A_LIST
from fleetpipe.paddle_types import CommunicateTopology
from fleetpipe.partition import LayerInfo, Partition

if TYPE_CHECKING:
    from fleetpipe.dygraph.state.files import LayerFiles

_log = log.logger(__name__)


class PipelineLayer(FleetFace):
    """A list of layers that is cut into stages, with the layers of this process's stages.

    One of several processes owns the stages of one rank; a single process owns all stages.

    A subclass may override ``state_dict``, ``set_state_dict``, ``parameters`` and
    ``named_parameters`` to give a state dict other keys: neither this class nor the wrapper calls
    these methods.

    A batch runs the layers that the model has when the batch begins: a library may replace layers
    before and after ``distributed_model``.

    Attributes:
        version: The number of times that the layers or parameters have changed.
        arrangement: Builds the schedules that can run these layers.
        placement: The rank of each stage.
        partition: The layers of each stage.
        owned_stages: Runs the layers of this process's stages.
    """

    #: All sublayers and parameters of the model at the last call of :meth:`follow`.
    _last_tree: Sequence[Any] = ()
    version = 0
    #: Whether a batch has begun: the first batch always calls ``train()``, as in Fleet.
    _has_begun = False

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: CommunicateTopology | None = None,
        loss_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        seg_method: str | Sequence[int] = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: Any = None,
        num_virtual_pipeline_stages: int | None = None,
        use_cudagraph: bool = False,
        use_dualpipev: bool = False,
        plan: LayerPlan | str | Path | None = None,
    ) -> None:
        """Cuts ``layers`` into stages and builds the layers of this process's stages.

        Before layer i is built, the random seed is set to 1234 + i, as in Fleet, and the random
        state is restored afterwards: initial weights depend neither on the user's seed nor on the
        cut.

        Args:
            layers: ``LayerDesc``, built ``nn.Layer`` or callables, in the order of the model. Each
                is called with one argument, the output of the one before.
            num_stages: Number of pipeline ranks. It may be left out if ``topology`` is given.
            topology: ``hcg.topology()``; its pipe axis gives the number of ranks.
            loss_fn: ``loss_fn(output, label)`` returns a Tensor with one element. It may be a list
                of such functions.
            seg_method: ``"uniform"``, ``"layer:Regex"``, ``"balanced"`` (by parameters) or the
                list of first layers of the stages.
            recompute_interval: Number of consecutive layers of a stage whose activations are
                dropped after forward and computed again in backward; 0 keeps all activations.
            recompute_ctx: Must be given with ``recompute_interval``, as in Fleet; its content has
                no effect.
            num_virtual_pipeline_stages: Chunks on each rank, v. None takes the schedule's own
                number: 2 for Interleaved1F1B and on a vee (ZBV, VHalf, VMin, DualPipeV), else 1.
            use_cudagraph: Accepted without effect.
            use_dualpipev: Chooses the schedule DualPipeV.
            plan: The result of :func:`fleetpipe.plan` for a profile of these layers, or its file.
                It has the cut, the chunks, the schedule and the layers to recompute.

        Raises:
            ConfigError: The number of stages is not given, or does not fit the job; or the schedule
                of the job's strategy cannot have that number of chunks; or the plan is of another
                model, or for other ranks or micro-batches.
            PartitionError: The layers cannot be cut as asked.
        """
        super().__init__()
        require_dynamic_graph("a PipelineLayer")
        job = current_job()
        self._num_stages = number_of_stages(num_stages, topology, job)
        users_list = entries.check_entries(layers)
        self._layers_desc = entries.expand(users_list, self._num_stages)
        self._topo = choose_topology(topology, self._num_stages, job)
        # A model of one stage in a job of several ranks is whole here, and needs no other rank.
        self._job = job if job is not None and job.degrees.pp == self._num_stages else None
        self.take_loss(loss_fn)
        interval = checked_interval(recompute_interval, recompute_ctx)
        loaded: Any = plan
        if plan is not None and not hasattr(plan, "require_layers"):  # a path
            loaded = pkgutil.resolve_name("fleetpipe.profiling:PipelinePlan").read(plan)
        layer_plan: LayerPlan | None = loaded
        if layer_plan is not None and (interval or seg_method != "uniform"):
            raise ConfigError(
                "the plan says where to cut, and what to recompute",
                got=f"seg_method={seg_method!r}, recompute_interval={interval} beside a plan",
                fix="leave seg_method and recompute_interval out, or the plan",
            )
        self._recompute = (
            () if layer_plan is None else tuple(chain.from_iterable(layer_plan.recompute))
        )
        self._recompute_interval, self.recompute_ctx = interval, recompute_ctx
        self.use_cudagraph = use_cudagraph
        self._blueprints = entries.Blueprints(self._layers_desc)
        if job is not None and job.shard[1] > 1:
            # Every rank builds all blueprints, and so refuses sizes that mp cannot cut before any
            # rank waits for another.
            list(self._blueprints)
        self._tied = tied.find_shared_layers(self._layers_desc, self._blueprints)
        self._shared_layers = {index: layer for layer in self._tied for index in layer.indices}
        self.arrangement = Arrangement(
            *(self._num_stages, num_virtual_pipeline_stages, use_dualpipev, layer_plan),
            head=len(self._layers_desc) > len(users_list),
        )
        self.placement = self.arrangement.placement
        if layer_plan is not None:
            layer_plan.require_layers([entries.class_name(entry) for entry in self._layers_desc])
            seg_method = layer_plan.partition.boundaries[: self.placement.body + 1]
        layers_to_cut = (
            self._layer_infos()
            if seg_method == "balanced"
            else [LayerInfo(entries.class_name(entry)) for entry in self._layers_desc]
        )
        self.partition = cut(layers_to_cut, self.placement, seg_method)
        if self._num_stages > 1:
            tied.refuse_split(self._layers_desc, self._blueprints, self.get_stage_from_index)
        self._stage_id, self._owned = own_stages(self.placement, self._job)
        self._build()
        if job is not None and not job.local and not self.state.own_parameters():
            log.once(
                _log.warning,
                f"the layers of rank {self._stage_id} of the pipeline have no parameters, and "
                "Paddle's optimizers take no empty list: cut elsewhere with seg_method",
                any_rank=True,
            )

    def extra_repr(self) -> str:
        """Returns the numbers of this process's stages, for the first line of the ``repr``."""
        return f"stages={self._owned} of {self.placement.stages}"

    def _build(self) -> None:
        """Builds the layers of this process's stages. Collective where ranks share weights."""
        indices = [index for stage in self._owned for index in self.partition.range_of(stage)]
        weights = holders(self._tied, self.get_stage_from_index)
        refuse_sparse(weights, self._tied, self._blueprints)
        self._registered = built = tied.build(self._layers_desc, indices, self._tied)
        built.register(self)
        self.state = ModelState(
            *(self, self._layers_desc, self._blueprints, self._shared_layers, built),
            *(self.partition, self.holders),
        )
        self._shared_weights = equal_copies(
            weights, self.state.local_tensors(), self._stage_id, self._job
        )
        self._first_parameters = self.state.own_parameters()
        self.owned_stages = OwnedStages(
            *(self._layers_desc, self.partition, self._owned),
            *(self._recompute_interval, self._recompute),
        )
        self.owned_stages.set_layers(built.functions, self._loss_fn)
        self._set_fleet_attributes(self._shared_layers, built.shared)

    def follow(self) -> None:
        """Makes the stages run the layers that the script has put into the model.

        Raises:
            ConfigError: A layer is gone, a shared layer has other parameters, or a script has put
                other layers into ``run_function``.
        """
        if tuple(self.run_function) != self._functions_in_list:
            raise ConfigError(
                "run_function shows what runs, and says nothing",
                got="other layers in the list",
                fix="put the layer into the model: setattr(model, str(number_in_the_list), layer)",
            )
        layers = paddle.nn.Layer.sublayers(self)
        tree = [*layers, *(p for layer in layers for p in parameters_in(layer).values())]
        same_length = len(tree) == len(self._last_tree)
        if same_length and all(map(operator.is_, tree, self._last_tree)):
            return
        self._registered.follow(self)
        parameters = self.state.own_parameters()
        refuse_untied(parameters, self._first_parameters, self._tied, self.get_stage_from_index)
        self.owned_stages.set_layers(self._registered.functions, self._loss_fn)
        self._list_functions(self._shared_layers)
        # The list keeps its objects alive, so no new object has the id of an old one.
        self._last_tree, self.version = tree, self.version + 1

    def built_layers(self) -> dict[int, tuple[int, int]]:
        """Returns (number in the list, rank) of each trained layer that the script built, by id."""
        return {
            id(layer): (number, self.get_stage_from_index(number))
            for number, entry in enumerate(self._layers_desc)
            if isinstance(entry, paddle.nn.Layer)
            for layer in entry.sublayers(include_self=True)
            if any(p is not None and not p.stop_gradient for p in parameters_in(layer).values())
        }

    def require_listed(self) -> None:
        """Refuses a ``forward`` of the model's own, and trained parameters outside of the list."""
        refuse_own_forward(self, PipelineLayer.forward)
        refuse_unlisted(self.state.own_parameters(), self.loss_parameters())

    def hidden_uses(self) -> HiddenUses | None:
        """Returns a finder of uses of other ranks' parameters in a batch; None with one stage."""
        if self._num_stages == 1:
            return None
        last = self.placement.rank_of(self.placement.stages - 1)
        functions: dict[int, list[object]] = {last: list(losses.functions_in(self._loss_fn))}
        stage_functions = self.owned_stages.functions
        owners: dict[int, set[int]] = {}
        for number, entry in enumerate(self._layers_desc):
            rank, function = self.get_stage_from_index(number), stage_functions.get(number, entry)
            functions.setdefault(rank, []).append(function)
            layers = [self._blueprints[number], self._registered.functions.get(number)]
            if isinstance(layers[1], functools.partial) and entries.is_shared(entry):
                layers += layers_in(layers[1])
            for layer in layers:
                for parameter in layer.parameters() if isinstance(layer, paddle.nn.Layer) else ():
                    owners.setdefault(id(parameter), set()).add(rank)
        for parameter in self.loss_parameters():
            owners.setdefault(id(parameter), set()).add(last)
        names = {id(parameter): name for name, parameter in self.state.own_parameters().items()}
        here = {self.placement.rank_of(stage) for stage in self._owned}
        rank_of = self.placement.rank_of
        return HiddenUses(functions, owners, names, rank_of, here)

    def companion(self, pipeline: Layer) -> BatchObserver | None:
        """Returns an observer that trains the plain model beside the first batches; None without.

        Args:
            pipeline: The wrapper of this model.
        """
        return None

    def begin(self, training: bool) -> None:
        """Prepares the model for a batch: puts its current layers into training or evaluation mode.

        The modes that a script has set apply: see :mod:`fleetpipe.dygraph.model.owned_stages`.

        Raises:
            ConfigError: The whole model has forward hooks, or a layer was removed or changed.
        """
        self.follow()
        refuse_hooks(self)
        model = self.with_modes
        if training and (not self._has_begun or owned_stages.needs_switch(model)):
            owned_stages.switch_to_training(model, self.train)
        elif not training and model.training:
            self.eval()
        else:
            owned_stages.record_modes(model)
        self._has_begun = True

    def eval(self) -> Any:
        """Puts all layers into evaluation mode, until a batch trains or a script switches them."""
        owned_stages.switch_to_evaluation(self, super().eval)
        return self

    def modes_in_training(self) -> list[tuple[str, bool]]:
        """Returns the path of each layer of this process, and its mode in training batches."""
        return owned_stages.modes_in_training_batches(self.with_modes)

    @property
    def with_modes(self) -> Layer:
        """The model whose layers a script switches between modes: this one, unless captured."""
        return self

    def _layer_infos(self) -> list[LayerInfo]:
        """Returns the class name and the number of parameters of each layer of the whole list."""
        return [
            LayerInfo(entries.class_name(entry), entries.count_parameters(layer))
            for entry, layer in zip(self._layers_desc, self._blueprints)
        ]

    def begin_uses(self) -> Uses:
        """Gives each use of a parameter its own gradient for one batch, to be added up by a tree.

        Raises:
            ConfigError: The uses of a parameter cannot be told apart.
        """
        shared = self._shared_weights.parameters()
        return self.owned_stages.begin_uses(self.loss_parameters(), shared)

    def forward(self, input: Nest, chunk_id: int | None = None) -> Nest:
        """Runs the layers of this process in order; in one process that is the whole model.

        Under the placement ``vee`` the two chunks of a rank do not follow each other in the model:
        pass ``chunk_id``.

        Args:
            input: The input of the first of these layers.
            chunk_id: The number of the chunk that runs, in :meth:`get_model_chunks`; None runs all.

        Raises:
            ConfigError: There is no such chunk.
        """
        self.follow()
        owned_stages.record_modes(self.with_modes)
        if chunk_id is not None:
            require_chunk(chunk_id, len(self._model_chunks))
        stages = self.owned_stages
        for stage in self._owned if chunk_id is None else (self._owned[chunk_id],):
            input = stages.function(stage)(input, None)
        return stages.value_of(input)

    def take_loss(self, loss_fn: Any) -> None:
        """Replaces the argument ``loss_fn`` of the constructor, from the next batch on.

        Raises:
            ConfigError: The loss cannot be called, or takes whole logits of a vocabulary head.
        """
        losses.require_functions(loss_fn)
        require = getattr(self._layers_desc[-1], "require_losses", None)
        if require is not None:
            require(losses.functions_in(loss_fn))
        # In the form in which Fleet stores it. Layer.__setattr__ would make a sublayer of a loss.
        self.__dict__["_loss_fn"] = (
            losses.functions_in(loss_fn) if LOSS_FUNCTIONS_ARE_A_LIST else loss_fn
        )

    def loss_functions(self) -> list[Criterion]:
        """Returns the loss functions; most models have one.

        Raises:
            ConfigError: The model was built without one.
        """
        return losses.required_functions(self._loss_fn)

    def loss_fn(self) -> Criterion:
        """Returns the first loss function; raises the errors of :meth:`loss_functions`."""
        return self.loss_functions()[0]

    def loss_layers(self) -> list[Layer]:
        """Returns the loss functions that are layers; no stage has them."""
        functions = losses.functions_in(self._loss_fn)
        return [f for f in functions if isinstance(f, paddle.nn.Layer)]

    def checkpoint_part(self) -> ModelParts:
        """Returns the part of the model, and of the loss, that checkpoints save in this process."""
        loss = paddle.nn.Layer()
        loss.loss = paddle.nn.LayerList(self.loss_layers())
        owns = self.placement.stages - 1 in self.owned_stages.owned
        return super().checkpoint_part()._replace(loss=loss, owns_loss=owns)

    def named_functions(self) -> dict[str, object]:
        """Returns the layers and functions of this process's stages, and the losses, by name.

        The name of a layer is its number in the list, that of a loss is ``loss.<number>``.
        """
        named: dict[str, object] = {str(n): f for n, f in self.owned_stages.functions.items()}
        functions = enumerate(losses.functions_in(self._loss_fn))
        return {**named, **{f"loss.{number}": function for number, function in functions}}

    def loss_parameters(self) -> list[Tensor]:
        """Returns the parameters of the loss functions that are layers."""
        return [parameter for layer in self.loss_layers() for parameter in layer.parameters()]

    def trained_parameters(self) -> list[Tensor]:
        """Returns the parameters of this process's stages and of the losses, each once."""
        # The method of Layer, because a subclass may override it with other names.
        parameters = [parameter for _, parameter in paddle.nn.Layer.named_parameters(self)]
        parameters += self.loss_parameters()
        return list({id(parameter): parameter for parameter in parameters}.values())

    def stage_table(self) -> str:
        """Returns a table of all stages: rank, layers, parameters. Not collective."""
        return self.counted_partition().table(self.placement.rank_of)

    def counted_partition(self) -> Partition:
        """Returns ``partition`` with the number of trainable parameters of each layer."""
        return Partition(
            self.partition.boundaries, self.partition.method, tuple(self._layer_infos())
        )

    def single_model(self) -> Layer:
        """Builds the whole list of layers in this process as one Layer, with fresh weights."""
        return single_model(self._layers_desc, self._tied, losses.functions_in(self._loss_fn))

    def _layer_files(self) -> LayerFiles:
        """Returns the object that writes and reads the files of this process's layers."""
        files_of_list = pkgutil.resolve_name("fleetpipe.dygraph.state.files:files_of_list")
        files: LayerFiles = files_of_list(
            *(self._layers_desc, self._registered.functions, self._shared_layers),
            *(self.partition, self.placement, self._job),
            SoleGroup if self._job is None else self._job.group,
        )
        return files

    def holders(self) -> Group:
        """Returns the ranks that together hold all stages and experts of this model."""
        if self._job is None:
            return SoleGroup()
        return self._job.whole_model() if self.state.spreads_experts else self._job.group()

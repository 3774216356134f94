"""Makes a ``PipelineLayer`` of a captured model: ``CapturedPipeline``.

Its entries are the model's inputs, the nodes of the capture, and the model's outputs; entry n + 1
is node n. After them come the parts of a vocabulary head, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.cutting.auto import Choice, find_cut_points, tensors_used_by
from fleetpipe.capture.explain import graphviz_text
from fleetpipe.capture.proof import Proof
from fleetpipe.capture.running.captured_state import (
    CapturedState,
    extract_used_layers,
    files_of_model,
    initialize,
    release,
    stages_using,
)
from fleetpipe.capture.running.stages import CapturedStages, Head, PlainCopy
from fleetpipe.capture.running.variants import (
    SameObject,
    StagedCaptures,
    require_same_parameters,
    tensor_references,
)
from fleetpipe.capture.tracing.value import Node
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.dygraph.model import owned_stages
from fleetpipe.dygraph.model.owned_stages import OwnedStages
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.layer_meter import first_uses
from fleetpipe.dygraph.state.files import LayerFiles
from fleetpipe.dygraph.state.names import Slot
from fleetpipe.dygraph.state.tied_weights import SharedWeight, SharedWeights, equal_copies
from fleetpipe.dygraph.sums import Uses
from fleetpipe.engine.observer import BatchObserver
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.extras import extra
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api.layer import share_tables
from fleetpipe.paddle_api.tensor import has_memory, is_parameter, refuse_values_of
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.profiling import PipelinePlan
from fleetpipe.schedules import Edge


class OwnedNodes(OwnedStages):
    """Runs this process's stages, for each micro-batch by the captured run of its signature.

    Attributes:
        borders: The :class:`CapturedStages`, which runs the stages and moves values between them.
    """

    borders: CapturedStages

    def __init__(
        self,
        captures: StagedCaptures,
        stages: CapturedStages,
        partition: Partition,
        owned: Sequence[int],
        functions: Mapping[int, Callable[..., Nest]],
        uses: Callable[[], list[list[Tensor]]],
    ) -> None:
        """Stores the captured runs, and the stages and functions of this process.

        Args:
            captures: The captured runs of the forward, cut into stages.
            stages: Runs the stages of the whole model.
            partition: The cut of the run of the example into stages.
            owned: The numbers of the stages that this process owns.
            functions: The functions of these stages, by number: 0 takes the model's inputs, then
                one for each node, then one for the outputs.
            uses: Returns, for each function of the whole model, its parameters and buffers.
        """
        self._captures, self.borders, self._tensors_of_entries = captures, stages, uses
        self._partition, self.owned, self.functions = partition, owned, functions

    @property
    def draws_python(self) -> bool:
        """Whether nodes draw from Python's or NumPy's generators, which then need seeds too."""
        return self._captures.of_example(training=True).trace.draws

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between the stages, in training or in evaluation."""
        return self.borders.edges(training)

    def function(self, stage: int) -> Run:
        """Returns the function that runs the nodes of a stage in the current mode."""
        return self.borders.function(stage)

    def layers(self, stage: int) -> Mapping[int, Callable[..., Nest]]:
        """Returns the layers that a stage calls, by the number of the function that first does."""
        # The stages after the captured ones are the parts of a vocabulary head.
        if stage >= self._captures.stages:
            return super().layers(stage)
        return self._captures.of_example(training=True).layers(stage)

    def calls_of(self, stage: int, value: Nest) -> tuple[Mapping[int, Callable[..., Nest]], Nest]:
        """Returns the functions that a stage runs, and the input of the first of them.

        Args:
            stage: The stage.
            value: The value that the stage receives; stage 0 receives the inputs of the model.

        Returns:
            The functions, by number in the whole model, and the input of the first function.

        Raises:
            ConfigError: The forward makes other calls for this micro-batch than for the example.
        """
        if stage >= self._captures.stages:
            return super().calls_of(stage, value)
        staged, value = self.borders.staged_capture(stage, value)
        example = self._captures.of_example(training=True)
        if [f.__name__ for f in staged.functions] != [f.__name__ for f in example.functions]:
            raise ConfigError(
                "a captured model is measured with micro-batches like the example",
                where=f"stage {stage}",
                got="one for which the forward makes other calls, as without images",
                fix="give batches in which every micro-batch has what example_inputs have",
            )
        return {n: staged.functions[n] for n in self._partition.range_of(stage)}, value

    def tensors(self) -> dict[int, list[Tensor]]:
        """Returns the parameters and buffers with memory here that each function uses, by number.

        Tensors that no node uses in training belong to function 0, which takes the inputs.
        """
        tensors = self._tensors_of_entries()
        return {n: [tensor for tensor in tensors[n] if has_memory(tensor)] for n in self.functions}

    def begin_uses(self, of_losses: Sequence[Tensor], shared: Collection[Tensor]) -> Uses:
        """Returns an object that tracks each use of these stages' parameters in the coming batch.

        The arguments are those of :meth:`OwnedStages.begin_uses`.

        Raises:
            ConfigError: Nodes of one stage use the same parameter.
        """
        parameters = {
            n: [*filter(is_parameter, used)] for n, used in enumerate(self._tensors_of_entries())
        }
        return Uses(self._by_stage(parameters, of_losses), _refuse_second_use, shared)

    def cut_places(self) -> tuple[int, ...]:
        """Returns the numbers of the functions with which a stage after stage 0 may begin."""
        training, evaluation = (self._captures.of_example(mode).trace for mode in (True, False))
        borders, _ = find_cut_points(training, evaluation)
        return tuple(number + 1 for number in borders)


def _refuse_second_use(number: int, parameter: Tensor) -> NoReturn:
    """Raises ConfigError: function ``number`` is a stage's second one that uses ``parameter``.

    Called if gradients are summed by trees, which need the gradient of each use by itself.
    """
    raise ConfigError(
        "with sums by a tree the uses of a tied weight leave gradients apart, and two nodes of one "
        "stage of a captured model would leave their sum",
        where=f"parameter {parameter.name}, node {number}",
        fix="cut the model between the two, make it a list of layers with SharedLayerDesc, or set "
        "fleetpipe_configs['sums'] = 'running'",
    )


class CapturedPipeline(PipelineLayer):
    """The stages of a captured model that this process owns.

    It is a ``PipelineLayer`` whose parameters and buffers have the plain model's names.

    Attributes:
        plain: The plain model, as the user built it. If several ranks run the pipeline, it has
            memory only for this rank's stages.
        captures: The captured runs of the forward, cut into stages.
        choice: The cut that was chosen by cost; None if the user gave the cut.
        proof: The result of the comparison with the plain model; None if nothing was compared.
        users: For each parameter or buffer, by name, the stages that use it.
    """

    plain: Layer
    captures: StagedCaptures
    choice: Choice | None
    proof: Proof | None
    users: dict[str, tuple[int, ...]]
    #: The parameters and buffers of the plain model when they were last compared, by name.
    _tensors: dict[str, SameObject]
    #: The vocabulary head whose parts are the last stages; None without one.
    _head: Head | None
    _shadowed: int

    def __init__(
        self,
        plain: Layer,
        captures: StagedCaptures,
        num_stages: int,
        num_chunks: int | None = None,
        loss_fn: Any = None,
        choice: Choice | None = None,
        proof: Proof | None = None,
        plan: PipelinePlan | None = None,
        shadowed: int = 0,
        head: Head | None = None,
    ) -> None:
        """Builds the pipeline from captured runs. Collective if ranks share weights.

        Args:
            plain: The plain model.
            captures: The captured runs of the forward, cut into stages.
            num_stages: Ranks of the pipeline.
            num_chunks: Chunks on each rank; None takes the schedule's own number.
            loss_fn: As for ``PipelineLayer``.
            choice: The cut that was chosen by cost; None if the user gave the cut.
            proof: The result of the comparison with the plain model; None without one.
            plan: The plan that the cut comes from; None without a plan.
            shadowed: How many of the first batches train the plain model too, to compare it with
                the stages.
            head: The vocabulary head whose parts are the last stages; None without one.
        """
        # Not by Layer.__setattr__, which would make a sublayer of the model.
        self.__dict__.update(plain=plain, captures=captures, choice=choice, proof=proof)
        self.__dict__.update(_shadowed=shadowed, _head=head)
        example = captures.of_example(training=True)
        described = [] if head is None else [head.description]
        cut: dict[str, Any] = {"plan": plan}
        if plan is None:
            cut = {"seg_method": [0, *(start + 1 for start in example.starts)]}
        super().__init__(
            [*example.functions, *described],
            num_stages=num_stages,
            num_virtual_pipeline_stages=num_chunks,
            loss_fn=loss_fn,
            **cut,
        )
        self._follow()

    def _build(self) -> None:
        """Makes the stages of this process, and allocates their parameters and buffers.

        Collective if ranks share weights.
        """
        example = self.captures.of_example(training=True)
        functions: dict[int, Callable[[Nest], Nest]] = dict(enumerate(example.functions))
        stages = CapturedStages(self.captures, lambda: self.training)
        if self._head is not None:
            functions = dict(enumerate([*example.functions, *self._head.functions()]))
            head = StageRunner(functions, self.partition, recompute=self._recompute)
            stages = self._head.stages(self.captures, lambda: self.training, head, self.placement)
        owned = {i: functions[i] for stage in self._owned for i in self.partition.range_of(stage)}
        self.__dict__["owned_stages"] = OwnedNodes(
            *(self.captures, stages, self.partition, self._owned, owned, self._tensors_of_entries)
        )
        users = stages_using(
            self.plain, lambda stage: self._nodes_of([stage]), self.placement.stages
        )
        self.__dict__.update(users=users, _tensors=tensor_references(self.plain))
        self.captures.users = users
        self._register_state()
        tensors = self.state.local_tensors()
        ranks = {
            name: tuple(dict.fromkeys(map(self.placement.rank_of, stages)))
            for name, stages in users.items()
        }
        initialize(self.plain, tensors)
        weights = [SharedWeight(name, holders) for name, holders in ranks.items()]
        self.__dict__["_shared_weights"] = equal_copies(weights, tensors, self._stage_id, self._job)
        if self._job is not None and not self._job.local:
            needed = {id(tensor) for tensor in (*tensors.values(), *self.captures.numbers)}
            of_other_ranks = [t for t in self.plain.state_dict().values() if id(t) not in needed]
            release(of_other_ranks)
            for parameter in filter(is_parameter, of_other_ranks):
                refuse_values_of(parameter)

    def _register_state(self) -> None:
        """Registers the sublayers and tensors of this process's stages under the model's names."""
        slots = [Slot.of(name, tensor) for name, tensor in self.plain.state_dict().items()]
        nodes = [node.name for node in self.captures.of_example(training=True).trace.nodes]
        self.state = CapturedState(self, slots, self.users, nodes, self.holders)
        self._shared_weights = SharedWeights([], {}, self._stage_id, lambda _: SoleGroup())
        self._set_fleet_attributes({}, {})
        # Last, and not by add_sublayer, since a model's names may be those of this class.
        self._share_sublayers()
        self.state.keep_parameters()

    def _share_sublayers(self) -> None:
        """Registers in this layer the plain model's sublayers and tensors that its stages use."""
        part, state, owned = self.plain, self.plain.state_dict(), set(self._owned)
        if len(owned) < self.placement.stages:
            # Tensors that no node uses are in stage 0.
            tensors = [id(t) for n, t in state.items() if owned & {*self.users.get(n, (0,))}]
            part = extract_used_layers(self.plain, self._nodes_of(self._owned), tensors)
        share_tables(part, self)

    @property
    def head_names(self) -> Mapping[str, str]:
        """Paddle's name of each parameter of a head's replaced Linear, by its path in the model."""
        return {} if self._head is None else self._head.counted_names

    def train(self, mode: bool = True) -> CapturedPipeline:
        """Switches the plain model by its own ``train()``, or with False by its own ``eval()``."""
        if mode:
            self.plain.train()
        else:
            owned_stages.switch_to_evaluation(self.plain, self.plain.eval)
        return self._follow()

    def eval(self) -> CapturedPipeline:
        """Switches the plain model to evaluation, by its own ``eval()``."""
        return self.train(False)

    def begin(self, training: bool) -> None:
        """Begins a batch: sets the plain model's mode, and follows changes of the model.

        Args:
            training: Whether the batch trains, instead of running forward only.
        """
        super().begin(training)
        self._follow()

    @property
    def with_modes(self) -> Layer:
        """The plain model, on whose layers a script sets training or evaluation."""
        return self.plain

    def follow(self) -> None:
        """Does nothing: the captured runs decide which layers run."""

    # The checks of a list of layers do not apply either: a capture has checks of its own.
    require_listed = hidden_uses = follow

    def _follow(self) -> CapturedPipeline:
        """Follows the changes that a script has made to the plain model since the last call.

        If an attribute on which the forward depends has changed, the forward is captured anew. The
        modes of the plain model's layers are copied to this pipeline.

        Returns:
            This pipeline.

        Raises:
            CaptureError: A parameter was replaced, or a stage would use a tensor that only another
                stage has.
        """
        change, now = self.captures.detect_change(), tensor_references(self.plain)
        require_same_parameters(self._tensors, now)
        if change is not None:
            self.captures.require_same_stages(change)
        if change is not None or self._tensors != now:
            # A script may have added buffers, or sublayers without parameters.
            self._share_sublayers()
        self.__dict__["_tensors"] = now
        # Most sublayers of this pipeline are the plain model's own. Where this process has a part
        # of one only, another Layer at its path has this part, and gets its mode here.
        layers = {id(layer) for layer in self.plain.sublayers()}
        modes = {path: sublayer.training for path, sublayer in self.plain.named_sublayers()}
        for path, layer in self.named_sublayers(include_self=True):
            if id(layer) not in layers:
                layer.training = modes.get(path, self.plain.training)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuses to copy the pipeline, whose captured calls are of this model's layers.

        Raises:
            StateError: Always.
        """
        raise StateError(
            "a captured pipeline is not copied",
            cause="its stages repeat calls of the plain model's own layers and functions",
            fix="for a teacher or an average, copy.deepcopy the plain model before "
            "fleetpipe.pipeline, or take pipe.single_model() where one process has all stages",
        )

    def graphviz(self) -> str:
        """Returns the graph of nodes in Graphviz's language, coloured by stage, on any rank.

        Values that cross between stages are red, with their bytes for a micro-batch like the
        example.
        """
        staged = self.captures.of_example(training=True)
        return graphviz_text(staged.trace, staged.starts)

    def companion(self, pipeline: PipelineParallel) -> BatchObserver | None:
        """Returns an observer that trains the plain model too on the pipeline's first batches.

        It compares the plain model with the pipeline. Returns None if no batch is to be compared.

        Args:
            pipeline: The wrapper of this model.
        """
        if not self._shadowed:
            return None
        shadow: BatchObserver = extra("shadow").Shadow(pipeline, self.captures, self._shadowed)
        return shadow

    def single_model(self) -> PlainCopy:
        """Returns a copy of the plain model that draws the same random numbers as the pipeline."""
        capturer = self.captures.capturer
        return PlainCopy(self.plain, capturer.example, capturer.unopened)

    def _layer_infos(self) -> list[LayerInfo]:
        """Returns each function's name, and how many numbers its trained parameters have.

        Parameters that an earlier function uses do not count.
        """
        return [
            LayerInfo(entry.__name__, sum(math.prod(t.shape) for t in new if not t.stop_gradient))
            for entry, new in zip(self._layers_desc, first_uses(self._tensors_of_entries()))
        ]

    def _tensors_of_entries(self) -> list[list[Tensor]]:
        """Returns, for each function of the whole model, the parameters and buffers that it uses.

        Those that no function uses count as used by the first one, which takes the inputs.
        """
        nodes = self.captures.of_example(training=True).trace.nodes
        uses = [tensors_used_by(node) for node in nodes]
        used = {id(tensor) for tensors in uses for tensor in tensors}
        of_head = [] if self._head is None else [part.parameters() for part in self._head.parts]
        used.update(id(tensor) for tensors in of_head for tensor in tensors)
        unused = [t for t in self.plain.state_dict().values() if id(t) not in used]
        # The entry of the outputs uses no tensors, and neither does the loss at the end of a head.
        return [unused, *uses, [], *of_head, *([[]] if of_head else [])]

    def _nodes_of(self, stages: Sequence[int]) -> list[Node]:
        """Returns some stages' nodes: in training, in evaluation, and of a vocabulary head."""
        body, nodes = self.placement.body, list[Node]()
        for training in (True, False):
            staged = self.captures.of_example(training)
            for stage in stages:
                nodes += staged.nodes(stage) if stage < body else ()
        for stage in stages:
            if self._head is not None and stage >= body:
                nodes += self._head.nodes(stage - body)
        return nodes

    def forward(self, input: Nest, chunk_id: int | None = None) -> Nest:
        """Runs the stages of this process in order, as :meth:`PipelineLayer.forward` does."""
        self._follow()
        return super().forward(input, chunk_id)

    def _layer_files(self) -> LayerFiles:
        """Returns Fleet's files of the plain model's layers."""
        state, where = self.state, (self._owned, self.placement, self._job, self.holders)
        return files_of_model(state.slots(), self.users, state.local_tensors(), *where)

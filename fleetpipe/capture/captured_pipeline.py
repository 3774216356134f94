"""A captured model as a ``PipelineLayer``, ``CapturedPipeline``, and the stages of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.cutting.auto import Choice, places, state_of
from fleetpipe.capture.explain import graph
from fleetpipe.capture.proof import Proof
from fleetpipe.capture.running.captured_state import (
    CapturedState,
    files_of_model,
    initialize,
    part_of,
    release,
    stages_of,
)
from fleetpipe.capture.running.stages import CapturedStages, Head, Untouched
from fleetpipe.capture.running.variants import (
    Form,
    Forms,
    Same,
    require_same_parameters,
    tensors_of,
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
from fleetpipe.paddle_api.tensor import has_memory, is_parameter, note_elsewhere
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.profiling import PipelinePlan
from fleetpipe.schedules import Edge


class OwnedNodes(OwnedStages):
    """Runs the nodes of a process's stages, by the captured run with a micro-batch's shapes."""

    borders: CapturedStages

    def __init__(
        self,
        forms: Forms,
        stages: CapturedStages,
        partition: Partition,
        owned: Sequence[int],
        functions: Mapping[int, Callable[..., Nest]],
        uses: Callable[[], list[list[Tensor]]],
    ) -> None:
        """Stores the captured runs and what this process owns of them.

        Args:
            forms: The captured runs.
            stages: Runs the stages of the whole model.
            partition: The cut of the run of the example.
            owned: The numbers of the stages that this process owns.
            functions: The functions of the entries of these stages, by their number in the model.
            uses: Returns the parameters and buffers of each entry of the whole model.
        """
        self._forms, self.borders, self._uses = forms, stages, uses
        self._partition, self.owned, self.functions = partition, owned, functions

    @property
    def draws_python(self) -> bool:
        """Whether nodes draw from Python's or NumPy's generators, which then need keys."""
        return self._forms.example(training=True).trace.draws

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between the stages, in training or in evaluation."""
        return self.borders.edges(training)

    def function(self, stage: int) -> Run:
        """Returns the function that runs the nodes of a stage in the current mode."""
        return self.borders.function(stage)

    def layers(self, stage: int) -> Mapping[int, Callable[..., Nest]]:
        """Returns the layers that are nodes of a stage, by the number of their first call."""
        if stage >= self._forms.stages:
            return super().layers(stage)
        return self._forms.example(training=True).layers(stage)

    def calls_of(self, stage: int, value: Nest) -> tuple[Mapping[int, Callable[..., Nest]], Nest]:
        """Returns the functions of a stage's nodes by number, and the input of the first one."""
        if stage >= self._forms.stages:
            return super().calls_of(stage, value)
        form, value = self.borders.form(stage, value)
        if _names(form) != _names(self._forms.example(training=True)):
            raise ConfigError(
                "a captured model is measured with micro-batches like the example",
                where=f"stage {stage}",
                got="one for which the forward makes other calls, as without images",
                fix="give batches in which every micro-batch has what example_inputs have",
            )
        return {n: form.functions[n] for n in self._partition.range_of(stage)}, value

    def tensors(self) -> dict[int, list[Tensor]]:
        """Returns the parameters and buffers of each entry of this process, by its number.

        Tensors that no node uses in training belong to the entry of the inputs.
        """
        uses = self._uses()
        return {n: [tensor for tensor in uses[n] if has_memory(tensor)] for n in self.functions}

    def begin_uses(self, of_losses: Sequence[Tensor], shared: Collection[Tensor]) -> Uses:
        """Returns the uses of each parameter of these stages: see :class:`OwnedStages`.

        Raises:
            ConfigError: Nodes of one stage use the same parameter.
        """
        parameters = {n: [*filter(is_parameter, used)] for n, used in enumerate(self._uses())}
        return Uses(self._by_stage(parameters, of_losses), _refuse_slots, shared)

    def cut_places(self) -> tuple[int, ...]:
        """Returns the numbers of the nodes with which a later stage may begin."""
        named, _ = places(*(self._forms.example(training).trace for training in (True, False)))
        return tuple(number + 1 for number in named)


def _names(form: Form) -> list[object]:
    """Returns the names of the functions of a run."""
    return [getattr(function, "__name__", None) for function in form.functions]


def _refuse_slots(number: int, parameter: Tensor) -> NoReturn:
    """Raises the error for a parameter that two nodes of one stage use, under sums by a tree."""
    raise ConfigError(
        "with sums by a tree the uses of a tied weight leave gradients apart, and two nodes of one "
        "stage of a captured model would leave their sum",
        where=f"parameter {parameter.name}, node {number}",
        fix="cut the model between the two, make it a list of layers with SharedLayerDesc, or set "
        "fleetpipe_configs['sums'] = 'running'",
    )


class Findings(NamedTuple):
    """The cut of a model and the results of its checks.

    Attributes:
        choice: The cut that was chosen by cost; None if the user gave one.
        proof: The comparison with the plain model; None if there was none.
        plan: The plan that the cut comes from; None if there is none.
        shadowed: Number of first batches to train beside the plain model.
        head: The vocabulary head whose parts are stages of their own; None without one.
    """

    choice: Choice | None = None
    proof: Proof | None = None
    plan: PipelinePlan | None = None
    shadowed: int = 0
    head: Head | None = None


class CapturedPipeline(PipelineLayer):
    """The stages of a captured model that this process owns.

    It is a ``PipelineLayer`` whose parameters and buffers have the plain model's names.

    Attributes:
        plain: The plain model. If several ranks run the pipeline, it has memory only for this
            rank's stages.
        forms: The captured runs of its forward.
        choice: The cut that was chosen by cost; None if the user gave one.
        proof: The comparison with the plain model; None if there was none.
        users: By name, the stages that use a parameter or buffer.
    """

    plain: Layer
    forms: Forms
    choice: Choice | None
    proof: Proof | None
    users: dict[str, tuple[int, ...]]
    _tensors: dict[str, Same]
    _head: Head | None
    _shadowed: int

    def __init__(
        self,
        plain: Layer,
        forms: Forms,
        num_stages: int,
        num_chunks: int | None = None,
        loss_fn: Any = None,
        findings: Findings | None = None,
    ) -> None:
        """Makes a pipeline of this process's stages. Collective if ranks share weights.

        Args:
            plain: The plain model.
            forms: The captured runs of its forward.
            num_stages: Ranks of the pipeline.
            num_chunks: Chunks on each rank; None takes the schedule's own number.
            loss_fn: As for ``PipelineLayer``.
            findings: The results of the checks of the model.
        """
        findings = findings or Findings()
        # Not by Layer.__setattr__, which would make a sublayer of the model.
        self.__dict__.update(
            plain=plain,
            forms=forms,
            choice=findings.choice,
            proof=findings.proof,
            _shadowed=findings.shadowed,
            _head=findings.head,
        )
        example = forms.example(training=True)
        described = [] if findings.head is None else [findings.head.description]
        cut: dict[str, Any] = {"plan": findings.plan}
        if findings.plan is None:
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
        """Allocates the tensors of this process's stages. Collective if ranks share weights."""
        example = self.forms.example(training=True)
        functions: dict[int, Callable[[Nest], Nest]] = dict(enumerate(example.functions))
        stages = CapturedStages(self.forms, lambda: self.training)
        if self._head is not None:
            functions = dict(enumerate([*example.functions, *self._head.functions()]))
            head = StageRunner(functions, self.partition, recompute=self._recompute)
            stages = self._head.stages(self.forms, lambda: self.training, head, self.placement)
        owned = {i: functions[i] for stage in self._owned for i in self.partition.range_of(stage)}
        self.__dict__["owned_stages"] = OwnedNodes(
            *(self.forms, stages, self.partition, self._owned, owned, self._uses)
        )
        users = stages_of(self.plain, lambda stage: self._nodes([stage]), self.placement.stages)
        self.__dict__.update(users=users, _tensors=tensors_of(self.plain))
        self.forms.users = users
        self._hold(users)
        tensors = self.state.local_tensors()
        ranks = {
            name: tuple(dict.fromkeys(map(self.placement.rank_of, stages)))
            for name, stages in users.items()
        }
        initialize(self.plain, tensors)
        weights = [SharedWeight(name, holders) for name, holders in ranks.items()]
        self.__dict__["_shared_weights"] = equal_copies(weights, tensors, self._stage_id, self._job)
        if self._job is not None and not self._job.local:
            kept = {id(tensor) for tensor in (*tensors.values(), *self.forms.numbers)}
            elsewhere = [t for t in self.plain.state_dict().values() if id(t) not in kept]
            release(elsewhere)
            for parameter in filter(is_parameter, elsewhere):
                note_elsewhere(parameter)

    def _hold(self, users: dict[str, tuple[int, ...]]) -> None:
        """Registers the sublayers of this process's stages under the model's names."""
        slots = [Slot.of(name, tensor) for name, tensor in self.plain.state_dict().items()]
        nodes = [node.name for node in self.forms.example(training=True).trace.nodes]
        self.state = CapturedState(self, slots, users, nodes, self.holders)
        self._shared_weights = SharedWeights([], {}, self._stage_id, lambda _: SoleGroup())
        self._set_fleet_attributes({}, {})
        # Last, and not by add_sublayer, since a model's names may be those of this class.
        self._take_part()
        self.state.keep_parameters()

    def _take_part(self) -> None:
        """Shares the tables of sublayers and tensors that this process's stages need."""
        part, state, owned = self.plain, self.plain.state_dict(), set(self._owned)
        if len(owned) < self.placement.stages:
            # Tensors that no node uses are in stage 0.
            tensors = [id(t) for n, t in state.items() if owned & {*self.users.get(n, (0,))}]
            part = part_of(self.plain, self._nodes(self._owned), tensors)
        share_tables(part, self)

    @property
    def head_names(self) -> Mapping[str, str]:
        """Paddle's names of the parameters of the Linear that a vocabulary head replaced."""
        return {} if self._head is None else self._head.counted_names

    def train(self, mode: bool = True) -> CapturedPipeline:
        """Switches the plain model to training by its own ``train()``, or else to evaluation."""
        self.plain.train() if mode else owned_stages.evaluate(self.plain, self.plain.eval)
        return self._follow()

    def eval(self) -> CapturedPipeline:
        """Switches the plain model to evaluation, by its own ``eval()``."""
        return self.train(False)

    def begin(self, training: bool) -> None:
        """Begins a batch, with the plain model's modes."""
        super().begin(training)
        self._follow()

    @property
    def with_modes(self) -> Layer:
        """The plain model, which has the layers' modes."""
        return self.plain

    def follow(self) -> None:
        """Does nothing: the captured runs decide which layers run."""

    require_listed = hidden_uses = follow

    def _follow(self) -> CapturedPipeline:
        """Captures the plain model anew if a script has changed it, and copies its modes."""
        change, now = self.forms.follow(), tensors_of(self.plain)
        require_same_parameters(self._tensors, now)
        if change is not None:
            self.forms.require_same_stages(change)
        if change is not None or self._tensors != now:
            # A script may have added buffers, or sublayers without parameters.
            self._take_part()
        self.__dict__["_tensors"] = now
        layers = {id(layer) for layer in self.plain.sublayers()}
        modes = {path: part.training for path, part in self.plain.named_sublayers()}
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
        form = self.forms.example(training=True)
        return graph(form.trace, form.starts)

    def companion(self, pipeline: PipelineParallel) -> BatchObserver | None:
        """Returns the observer that trains the plain model beside the first batches, if any."""
        if not self._shadowed:
            return None
        shadow: BatchObserver = extra("shadow").Shadow(pipeline, self.forms, self._shadowed)
        return shadow

    def single_model(self) -> Untouched:
        """Returns a copy of the plain model that draws the pipeline's random numbers."""
        capturing = self.forms.capturing
        return Untouched(self.plain, capturing.example, capturing.unopened)

    def _layer_infos(self) -> list[LayerInfo]:
        """Returns the name of each entry, and the number of parameters that no earlier one uses."""
        return [
            LayerInfo(entry.__name__, sum(math.prod(t.shape) for t in new if not t.stop_gradient))
            for entry, new in zip(self._layers_desc, first_uses(self._uses()))
        ]

    def _uses(self) -> list[list[Tensor]]:
        """Returns the tensors that each entry uses; the first entry has the unused ones."""
        nodes = self.forms.example(training=True).trace.nodes
        uses = [state_of(node) for node in nodes]
        used = {id(tensor) for tensors in uses for tensor in tensors}
        of_head = [] if self._head is None else [part.parameters() for part in self._head.parts]
        used.update(id(tensor) for tensors in of_head for tensor in tensors)
        unused = [t for t in self.plain.state_dict().values() if id(t) not in used]
        return [unused, *uses, [], *of_head, *([[]] if of_head else [])]

    def _nodes(self, stages: Sequence[int]) -> list[Node]:
        """Returns the nodes of some stages, in both modes."""
        body = self.placement.body
        forms = [self.forms.example(training) for training in (True, False)]
        nodes = [n for form in forms for at in stages if at < body for n in form.nodes(at)]
        head = self._head
        return nodes + [n for at in stages if head and at >= body for n in head.nodes(at - body)]

    def forward(self, input: Nest, chunk_id: int | None = None) -> Nest:
        """Runs the stages of this process in order; see :meth:`PipelineLayer.forward`."""
        self._follow()
        return super().forward(input, chunk_id)

    def _layer_files(self) -> LayerFiles:
        state = self.state
        return files_of_model(
            state.slots(),
            self.users,
            state.local_tensors(),
            self._owned,
            self.placement,
            self._job,
            self.holders,
        )

"""A captured model with the face of a ``PipelineLayer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer
from fleetpipe.capture.edges import CapturedBorders, crossing
from fleetpipe.capture.replay import entries
from fleetpipe.capture.state import CapturedState, part_of, used_by
from fleetpipe.capture.value import Capture, Node
from fleetpipe.dygraph.batch.stage import Borders
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.state.names import Slot
from fleetpipe.dygraph.state.tied_weights import SharedWeights
from fleetpipe.engine.stage import Values
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.schedules import Edge


class _Mode(NamedTuple):
    """What runs in training, or what runs in evaluation."""

    runner: StageRunner
    edges: Sequence[Edge]
    borders: CapturedBorders


class CapturedPipeline(PipelineLayer):
    """The stages of a captured model that this process owns.

    A parameter is called as in the plain model.

    Attributes:
        capture: The nodes and edges of the model.
    """

    capture: Capture

    def __init__(
        self,
        model: Layer,
        capture: Capture,
        starts: dict[bool, list[int]],
        num_stages: int,
        num_chunks: int | None = None,
        loss_fn: Any = None,
    ) -> None:
        """Takes the nodes of this process's stages.

        Args:
            model: The plain model.
            capture: What its forward does.
            starts: In training and in evaluation, the first node of each stage but stage 0.
            num_stages: Ranks of the pipeline.
            num_chunks: Chunks on each; None for the schedule's own number.
            loss_fn: As for ``PipelineLayer``.
        """
        # Around Layer.__setattr__, which would make a sublayer of the model.
        self.__dict__.update(_plain=model, capture=capture, _starts=starts)
        super().__init__(
            entries(capture.training),
            num_stages=num_stages,
            num_virtual_pipeline_stages=num_chunks,
            loss_fn=loss_fn,
            seg_method=[0, *(start + 1 for start in starts[True])],
        )

    def _build(self) -> None:
        """Takes what this process's stages use. Collective where ranks share weights."""
        self.__dict__["_modes"] = {training: self._mode(training) for training in (True, False)}
        functions = dict(enumerate(self._layers_desc))
        self._functions = {i: functions[i] for stage in self._owned for i in self._range(stage)}
        self.runner = self._modes[True].runner
        stages = self._stages_of_tensors()
        self._shared_weights = SharedWeights([], {}, self._stage_id, lambda _: None)
        self._set_fleet_attributes({}, {})
        self._register()
        state = self._plain.state_dict()
        slots = [Slot(name, tuple(tensor.shape)) for name, tensor in state.items()]
        self.state = CapturedState(self, slots, stages, self._group)

    @property
    def borders(self) -> Borders:
        """What crosses between the stages."""
        return self

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between the stages, in training or in evaluation."""
        edges: Sequence[Edge] = self._modes[training].edges
        return edges

    def function(self, stage: int) -> Run:
        """Returns what runs the nodes of a stage in the mode that the model is in."""
        run: Run = self._modes[self.training].runner.function(stage)
        return run

    def joined(self, values: Values) -> Any:
        """See :class:`fleetpipe.dygraph.batch.stage.Borders`."""
        return self._modes[self.training].borders.joined(values)

    def parted(self, stage: int, output: Any) -> Values:
        """See :class:`fleetpipe.dygraph.batch.stage.Borders`."""
        values: Values = self._modes[self.training].borders.parted(stage, output)
        return values

    def _mode(self, training: bool) -> _Mode:
        trace, starts = self.capture.of(training), self._starts[training]
        functions = entries(trace)
        infos = tuple(LayerInfo(str(getattr(f, "__name__", ""))) for f in functions)
        bounds = (0, *(start + 1 for start in starts), len(functions))
        runner = StageRunner(dict(enumerate(functions)), Partition(bounds, "captured", infos))
        found = crossing(trace, starts)
        return _Mode(runner, tuple(found), CapturedBorders(found, self.placement.stages))

    def _nodes(self, stages: Sequence[int]) -> list[Node]:
        """Returns the nodes of some stages, in both modes."""
        found = []
        for training in (True, False):
            nodes = self.capture.of(training).nodes
            bounds = [0, *self._starts[training], len(nodes)]
            for stage in stages:
                found += nodes[bounds[stage] : bounds[stage + 1]]
        return found

    def _stages_of_tensors(self) -> dict[str, set[int]]:
        """Returns, by name, the stages that use a parameter or a buffer of the model."""
        names = {id(tensor): name for name, tensor in self._plain.state_dict().items()}
        stages: dict[str, set[int]] = {}
        for stage in range(self.placement.stages):
            layers, tensors = used_by(self._nodes([stage]))
            part = part_of(self._plain, layers, tensors)
            for tensor in part.state_dict().values() if part is not None else ():
                stages.setdefault(names[id(tensor)], set()).add(stage)
        return stages

    def _register(self) -> None:
        """Makes sublayers of what this process's stages use, under the names of the model."""
        for name, layer in self._plain._sub_layers.items():
            self.add_sublayer(name, layer)
        for name, parameter in self._plain._parameters.items():
            self.add_parameter(name, parameter)
        for name, buffer in self._plain._buffers.items():
            self.register_buffer(name, buffer)

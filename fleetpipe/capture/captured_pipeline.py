"""A captured model with the face of a ``PipelineLayer``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer
from fleetpipe.capture.edges import CapturedBorders, crossing
from fleetpipe.capture.replay import entries
from fleetpipe.capture.state import CapturedState, part_of, release, stages_of
from fleetpipe.capture.value import Capture, Node
from fleetpipe.dygraph.batch.stage import Borders
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.state.names import Slot
from fleetpipe.dygraph.state.tied_weights import SharedWeight, SharedWeights, connected
from fleetpipe.engine.stage import Values
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.schedules import Edge
from fleetpipe.transport import SoleGroup


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
        self._hold()

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
        found: list[Node] = []
        for training in (True, False):
            nodes = self.capture.of(training).nodes
            bounds = [0, *self._starts[training], len(nodes)]
            for stage in stages:
                found += nodes[bounds[stage] : bounds[stage + 1]]
        return found

    def _layer_infos(self) -> list[LayerInfo]:
        """Returns the name of each entry, with the parameters that no earlier one uses."""
        seen: set[int] = set()
        infos = []
        for entry in self._layers_desc:
            new = {
                id(parameter): parameter
                for layer in getattr(entry, "args", ())
                for parameter in layer.parameters()
                if parameter.trainable and id(parameter) not in seen
            }
            seen.update(new)
            sizes = (math.prod(parameter.shape) for parameter in new.values())
            infos.append(LayerInfo(entry.__name__, sum(sizes)))
        return infos

    def _hold(self) -> None:
        """Makes sublayers of what this process's stages use, under the names of the model."""
        model = self._plain
        state = model.state_dict()
        users = stages_of(model, lambda stage: self._nodes([stage]), self.placement.stages)
        own = set(self._owned)
        # What no node uses is in stage 0.
        tensors = [id(state[name]) for name, stages in users.items() if own & {*stages}]
        part = part_of(model, self._nodes(self._owned), tensors)
        slots = [Slot(name, tuple(tensor.shape)) for name, tensor in state.items()]
        self.state = CapturedState(self, slots, users, self._group)
        self._shared_weights = SharedWeights([], {}, self._stage_id, lambda _: SoleGroup())
        self._set_fleet_attributes({}, {})
        # Last, and around add_sublayer: a model may use any name, and this class has many.
        for kind in ("_sub_layers", "_parameters", "_buffers"):
            getattr(self, kind).update(getattr(part, kind))
        self._non_persistable_buffer_names_set = part._non_persistable_buffer_names_set
        ranks = {
            name: tuple(dict.fromkeys(map(self.placement.rank_of, stages)))
            for name, stages in users.items()
        }
        weights = [SharedWeight(name, holders) for name, holders in ranks.items()]
        self.__dict__["_shared_weights"] = connected(
            weights, self.state.own(), self._stage_id, self._job
        )
        if self._job is not None and not self._job.local:
            release(state, self.state.own())

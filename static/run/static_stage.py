"""The stage of static graph: runs its pieces, and stores the values that backward needs.

Pieces exchange values as variables of one scope under fixed names. Each stage has its own random
stream, so that the numbers do not depend on the order of actions. Start with :class:`StaticStage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import DType, Place, Scope, ScopeTensor
from fleetpipe.engine.stage import Values
from fleetpipe.errors import StateError
from fleetpipe.paddle_api import paddle, static
from fleetpipe.paddle_api.random import generator_of, seedings
from fleetpipe.schedules import Edge
from fleetpipe.static.cut import Pieces, Split, StageProgram

#: The distance of the seeds of two stages; odd and large, so that nearby seeds do not coincide.
_STRIDE = 0x9E3779B1

#: ``feed(name, micro_batch, tensor)`` copies the feed of a micro-batch into a dense tensor.
Feed = Callable[[str, int, ScopeTensor], None]
#: The variables of the values on each edge; None where a value has no gradient.
EdgeNames = Mapping[Edge, Sequence[str | None]]


class Streams:
    """The random streams of this process's stages.

    The first stage that draws uses the default generator, as the unsplit program does. Each later
    stage has its own stream, whose seed is computed from that generator's seed and the stage's
    number. A call of ``paddle.seed`` restarts all streams.
    """

    def __init__(self, drawing: Iterable[int], stages: Iterable[int], place: Place) -> None:
        self._generator, self._seedings = generator_of(place), seedings()
        self._stages = sorted(set(sorted(drawing)[1:]).intersection(stages))
        self._states: dict[int, Any] = {}
        self.begin({})

    @property
    def states(self) -> Mapping[int, Any]:
        """The generator state of each stage with its own stream."""
        return self._states

    def begin(self, states: Mapping[int, Any]) -> None:
        """Restarts the streams: from ``states``, or from the current seed for other stages."""
        now = self._generator.get_state()
        seed = self._generator.initial_seed()
        for stage in self._stages:
            self._generator.manual_seed((seed + stage * _STRIDE) % (1 << 63))
            self._states[stage] = states.get(stage, self._generator.get_state())
        self._generator.set_state(now)

    def follow_seed(self) -> None:
        """Restarts the streams if the script has called ``paddle.seed`` since they began."""
        if self._seedings != seedings():
            self._seedings = seedings()
            self.begin({})

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """While this context is open, ``stage`` draws from its own stream."""
        if stage not in self._states:
            yield
            return
        program_state = self._generator.get_state()
        self._generator.set_state(self._states[stage])
        try:
            yield
        finally:
            self._states[stage] = self._generator.get_state()
            self._generator.set_state(program_state)


class StagePart(NamedTuple):
    """A piece of a backward with its executor.

    Attributes:
        run: Runs the piece; None if it has nothing to compute.
        takes: The variables that it takes besides output gradients, each with its tensor.
    """

    run: Callable[[Sequence[str], bool], object] | None
    takes: Sequence[tuple[str, ScopeTensor]]


class ProgramRunner:
    """The pieces of one stage with executors for one scope and device."""

    def __init__(
        self,
        program: StageProgram,
        pieces: Pieces,
        split: Split,
        stage: int,
        fetches: Iterable[int],
        scope: Scope,
        place: Place,
    ) -> None:
        """Creates the executors of a stage.

        Args:
            program: The stage with its backward.
            pieces: The pieces of the stage; they export ``fetches`` and the outgoing values.
            split: The cut of the whole program.
            stage: The number of the stage.
            fetches: The values of the stage that the user fetches.
            scope: The scope of parameters and exchanged variables.
            place: The device.
        """
        names = _variables(program, split, stage)
        fetched = {number: program.outgoing(number) for number in fetches}
        passing = [*_names(names.inputs), *_names(names.outputs), *fetched.values()]
        forward_names = {*program.feeds.values(), *passing}
        kept, waiting = pieces.kept, pieces.weight_grad.waiting
        backward_names = {*kept, *waiting, *_names(names.output_grads), *_names(names.input_grads)}

        # A variable must exist before the executor that takes it is created, and a piece that makes
        # a variable comes before those that take it. Creating an executor may replace variables: so
        # the tensors are looked up before and after.
        for name in sorted({*forward_names, *backward_names, *program.accumulators.values()}):
            static.tensor_of(scope, name)
        self.run_forward = static.job_executor(pieces.forward, scope, place).run
        backwards = (pieces.backward, pieces.input_grad, pieces.weight_grad)
        runs = [
            None if piece.program is None else static.job_executor(piece.program, scope, place).run
            for piece in backwards
        ]
        tensors = {
            name: static.tensor_of(scope, name) for name in {*forward_names, *backward_names}
        }

        def of(group: EdgeNames) -> dict[Edge, list[ScopeTensor]]:
            return {
                edge: [None if name is None else tensors[name] for name in some]
                for edge, some in group.items()
            }

        self.fed = [(name, tensors[variable]) for name, variable in program.feeds.items()]
        self.inputs, self.outputs = of(names.inputs), of(names.outputs)
        self.output_grads, self.input_grads = of(names.output_grads), of(names.input_grads)
        self.fetched = {number: tensors[name] for number, name in fetched.items()}
        self.kept = [(name, tensors[name], by_shape) for name, by_shape in kept.items()]
        self.after_forward = [tensors[name] for name in sorted({*forward_names, *kept})]
        self.after_backward = [tensors[name] for name in sorted(backward_names)]
        self.backward, self.input_grad, self.weight_grad = (
            StagePart(run, [(name, tensors[name]) for name in (*piece.kept, *piece.waiting)])
            for piece, run in zip(backwards, runs)
        )


class _Variables(NamedTuple):
    """The variables of the values on the edges of a stage, and of the values' gradients."""

    inputs: EdgeNames
    outputs: EdgeNames
    output_grads: EdgeNames
    input_grads: EdgeNames


def _variables(program: StageProgram, split: Split, stage: int) -> _Variables:
    """Returns the names of the variables that a stage's program has for its edges."""
    crossing, differentiable = split.crossing, split.graph.differentiable
    into = sorted(edge for edge in crossing if edge.target == stage)
    out = sorted(edge for edge in crossing if edge.source == stage)
    return _Variables(
        {edge: [program.incoming(n) for n in crossing[edge]] for edge in into},
        {edge: [program.outgoing(n) for n in crossing[edge]] for edge in out},
        {
            edge: [
                split.names.gradient(stage, n, edge.target) if n in differentiable else None
                for n in crossing[edge]
            ]
            for edge in out
        },
        {edge: [program.input_gradients.get(n) for n in crossing[edge]] for edge in into},
    )


def _names(group: EdgeNames) -> list[str]:
    return [name for names in group.values() for name in names if name is not None]


class _Kept(NamedTuple):
    """The values that a stage stores of a micro-batch for its backward.

    Attributes:
        variables: The variables that its pieces share, by name; of some only the shape.
        shapes: The shape and dtype of each value on the outgoing edges.
    """

    variables: Mapping[str, ScopeTensor | list[int]]
    shapes: Mapping[Edge, Sequence[tuple[list[int], DType]]]


class StaticStage:
    """Implements the engine's ``Stage`` for the stages of a split program.

    The value of an edge is a tuple of dynamic tensors that share the data of variables. The
    gradient of an edge has None for a value without a gradient. Everything runs in dynamic mode.
    """

    def __init__(self, runners: Mapping[int, ProgramRunner], streams: Streams) -> None:
        """Creates a stage object of the stages that have runners.

        Args:
            runners: The pieces of each stage that this process owns.
            streams: The random streams of the stages.
        """
        self._runners = runners
        self._streams = streams
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._feed: Feed = _nothing_fed
        self._first = 0
        self.fetched: dict[int, dict[int, np.ndarray]] = {}

    def begin(self, feed: Feed, first_micro_batch: int) -> None:
        """Starts a batch, whose micro-batch 0 has the global number ``first_micro_batch``."""
        self._feed, self._first = feed, first_micro_batch
        self._kept.clear()
        self.fetched = {}

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        """Runs the forward piece on the values of the edges and the feed."""
        runner = self._runners[stage]
        for edge, tensors in runner.inputs.items():
            for tensor, value in zip(tensors, inputs[edge]):
                static.share(tensor, value.get_tensor())
        for name, tensor in runner.fed:
            self._feed(name, micro_batch - self._first, tensor)
        with self._streams.of(stage):
            runner.run_forward([], False)
        for number, tensor in runner.fetched.items():
            self.fetched.setdefault(number, {})[micro_batch] = np.array(tensor)
        outputs = {
            edge: tuple(map(static.dynamic, tensors)) for edge, tensors in runner.outputs.items()
        }
        shapes = {
            edge: [(tensor.shape, tensor.dtype) for tensor in tensors]
            for edge, tensors in outputs.items()
        }
        kept = {
            name: tensor.shape() if by_shape else static.take(tensor)
            for name, tensor, by_shape in runner.kept
        }
        self._kept[stage, micro_batch] = _Kept(kept, shapes)
        for tensor in runner.after_forward:
            static.release(tensor)
        return outputs

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """Runs the backward piece, which adds to the accumulators."""
        runner = self._runners[stage]
        grads = self._differentiate(runner, runner.backward, (stage, micro_batch), output_grads)
        for tensor in runner.after_backward:
            static.release(tensor)
        return grads

    def input_grad(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """Runs I, and stores only the values that W takes."""
        runner, key = self._runners[stage], (stage, micro_batch)
        grads = self._differentiate(runner, runner.input_grad, key, output_grads)
        kept = self._kept[key].variables
        later = {
            name: kept[name] if name in kept else static.take(tensor)
            for name, tensor in runner.weight_grad.takes
        }
        self._kept[key] = _Kept(later, {})
        for tensor in runner.after_backward:
            static.release(tensor)
        return grads

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        """Runs W, which adds to the accumulators."""
        runner = self._runners[stage]
        part = runner.weight_grad
        if part.run is not None:
            self._put_back(part, self._kept[stage, micro_batch])
            part.run([], False)
            for _, tensor in part.takes:
                static.release(tensor)

    def _differentiate(
        self, runner: ProgramRunner, part: StagePart, key: tuple[int, int], output_grads: Values
    ) -> Values:
        """Runs a piece on the gradients of outgoing values; returns the incoming values' gradients.

        Args:
            runner: The pieces of the stage.
            part: The piece: B or I.
            key: The stage and the micro-batch.
            output_grads: The gradients of the outgoing values, by edge.
        """
        if part.run is None:
            return {edge: (None,) * len(tensors) for edge, tensors in runner.inputs.items()}
        kept = self._kept[key]
        self._put_back(part, kept)
        for edge, tensors in runner.output_grads.items():
            for tensor, value, shape in zip(tensors, output_grads[edge], kept.shapes[edge]):
                if tensor is not None:
                    # None: the loss does not depend on the value by this edge.
                    value = paddle.zeros(*shape) if value is None else value
                    static.share(tensor, value.get_tensor())
        part.run([], False)
        return {
            edge: tuple(None if tensor is None else static.dynamic(tensor) for tensor in tensors)
            for edge, tensors in runner.input_grads.items()
        }

    def _put_back(self, part: StagePart, kept: _Kept) -> None:
        """Puts stored values into the variables that a piece takes."""
        for name, tensor in part.takes:
            static.put_back(tensor, kept.variables[name])

    def release(self, stage: int, micro_batch: int) -> None:
        """Drops the stored values of a stage and micro-batch."""
        del self._kept[stage, micro_batch]


def _nothing_fed(name: str, micro_batch: int, tensor: ScopeTensor) -> None:
    raise StateError(f"{name!r} is fed outside of a batch")

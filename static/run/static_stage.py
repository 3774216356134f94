"""The stage of static graph: runs a program for each action, and saves what backward needs.

The programs of a stage exchange values as variables of one scope under fixed names. Each stage has
its own random stream, so that the numbers do not depend on the order of actions. Start with
:class:`StaticStage`.
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
from fleetpipe.paddle_api.random import generator_of, seeding_count
from fleetpipe.schedules import Edge
from fleetpipe.static.cut import NativePrograms, Split, StageProgram

#: The distance of the seeds of two stages; odd and large, so that nearby seeds do not coincide.
_STRIDE = 0x9E3779B1

#: ``feed(name, micro_batch, tensor)`` copies the feed of a micro-batch into a dense tensor.
Feed = Callable[[str, int, ScopeTensor], None]
#: The names of the variables of the values on each edge, or of their gradients; None where a value
#: has no gradient.
EdgeNames = Mapping[Edge, Sequence[str | None]]


class Streams:
    """The random streams of this process's stages.

    The first stage that draws uses the default generator, as the unsplit program does. Each later
    stage has its own stream, whose seed is computed from that generator's seed and the stage's
    number. A call of ``paddle.seed`` restarts all streams.
    """

    def __init__(self, random_stages: Iterable[int], stages: Iterable[int], place: Place) -> None:
        """Begins the streams from the current seed.

        Args:
            random_stages: All stages of the program that draw random numbers.
            stages: The stages of this process.
            place: The device, whose default generator all streams use in turn.
        """
        self._generator, self._seedings = generator_of(place), seeding_count()
        self._stages = sorted(set(sorted(random_stages)[1:]).intersection(stages))
        self._states: dict[int, Any] = {}
        self.begin({})

    @property
    def states(self) -> Mapping[int, Any]:
        """The generator state of each stage with its own stream."""
        return self._states

    def begin(self, states: Mapping[int, Any]) -> None:
        """Restarts the streams: from ``states``, or from the current seed for other stages."""
        default_state = self._generator.get_state()
        seed = self._generator.initial_seed()
        for stage in self._stages:
            self._generator.manual_seed((seed + stage * _STRIDE) % (1 << 63))
            self._states[stage] = states.get(stage, self._generator.get_state())
        self._generator.set_state(default_state)

    def follow_seed(self) -> None:
        """Restarts the streams if the script has called ``paddle.seed`` since they began."""
        if self._seedings != seeding_count():
            self._seedings = seeding_count()
            self.begin({})

    @contextmanager
    def at_stream_of(self, stage: int) -> Iterator[None]:
        """Opens a context in which the generator is at the random stream of ``stage``."""
        if stage not in self._states:
            yield
            return
        default_state = self._generator.get_state()
        self._generator.set_state(self._states[stage])
        try:
            yield
        finally:
            self._states[stage] = self._generator.get_state()
            self._generator.set_state(default_state)


class BackwardRunner(NamedTuple):
    """The program of a full backward, or of one half of a split backward, with its executor.

    Attributes:
        run: Runs the program; None if it has nothing to compute.
        saved: The variables that it takes besides output gradients: names and tensors.
    """

    run: Callable[[Sequence[str], bool], object] | None
    saved: Sequence[tuple[str, ScopeTensor]]


class ProgramRunner:
    """The programs of one stage, with executors for one scope and device."""

    def __init__(
        self,
        stage_program: StageProgram,
        programs: NativePrograms,
        split: Split,
        stage: int,
        fetches: Iterable[int],
        scope: Scope,
        place: Place,
    ) -> None:
        """Creates the executors of a stage.

        Args:
            stage_program: The stage with its backward.
            programs: The programs of the stage's actions; F exports ``fetches`` and what leaves.
            split: The cut of the whole program.
            stage: The number of the stage.
            fetches: The values of the stage that the user fetches.
            scope: The scope of parameters and exchanged variables.
            place: The device.
        """
        inputs, outputs, output_grads, input_grads = _edge_variables(stage_program, split, stage)
        fetched = {number: stage_program.outgoing(number) for number in fetches}
        of_edges = {*_names_on(inputs), *_names_on(outputs)}
        forward_names = {*stage_program.feeds.values(), *of_edges, *fetched.values()}
        saved = programs.saved
        of_edges = {*_names_on(output_grads), *_names_on(input_grads)}
        backward_names = {*saved, *programs.weight_grad.waiting, *of_edges}

        # A variable must exist before the executor that takes it is created, and the program that
        # computes a variable comes before those that take it. Creating an executor may replace
        # variables: so the tensors are looked up before and after.
        for name in sorted({*forward_names, *backward_names, *stage_program.accumulators.values()}):
            static.tensor_of(scope, name)
        self.run_forward = static.job_executor(programs.forward, scope, place).run
        backwards = (programs.backward, programs.input_grad, programs.weight_grad)
        runs = [
            None
            if backward.program is None
            else static.job_executor(backward.program, scope, place).run
            for backward in backwards
        ]
        tensors = {
            name: static.tensor_of(scope, name) for name in {*forward_names, *backward_names}
        }

        def tensors_on(edges: EdgeNames) -> dict[Edge, list[ScopeTensor]]:
            """Returns the tensors of the variables on each edge; None for no variable."""
            return {
                edge: [None if name is None else tensors[name] for name in edge_names]
                for edge, edge_names in edges.items()
            }

        self.fed = [(name, tensors[variable]) for name, variable in stage_program.feeds.items()]
        self.inputs, self.outputs = tensors_on(inputs), tensors_on(outputs)
        self.output_grads, self.input_grads = tensors_on(output_grads), tensors_on(input_grads)
        self.fetched = {number: tensors[name] for number, name in fetched.items()}
        #: The variables to save after F: name, tensor, and whether only the shape is needed.
        self.saved = [(name, tensors[name], shape_only) for name, shape_only in saved.items()]
        #: The tensors whose memory is free after F, and after B or I.
        self.after_forward = [tensors[name] for name in sorted({*forward_names, *saved})]
        self.after_backward = [tensors[name] for name in sorted(backward_names)]
        self.backward, self.input_grad, self.weight_grad = (
            BackwardRunner(
                run, [(name, tensors[name]) for name in (*backward.saved, *backward.waiting)]
            )
            for backward, run in zip(backwards, runs)
        )


def _edge_variables(
    program: StageProgram, split: Split, stage: int
) -> tuple[EdgeNames, EdgeNames, EdgeNames, EdgeNames]:
    """Returns the names of the variables on a stage's incoming and outgoing edges.

    Returns four dicts by edge: the variables of the incoming values, of the outgoing values, of the
    gradients of the outgoing values, and of the gradients of the incoming values.
    """
    crossing, differentiable = split.crossing, split.graph.differentiable
    incoming = sorted(edge for edge in crossing if edge.target == stage)
    outgoing = sorted(edge for edge in crossing if edge.source == stage)

    def gradient(value: int, target: int) -> str | None:
        name = split.names.gradient(stage, value, target)
        return name if value in differentiable else None

    return (
        {edge: [program.incoming(n) for n in crossing[edge]] for edge in incoming},
        {edge: [program.outgoing(n) for n in crossing[edge]] for edge in outgoing},
        {edge: [gradient(n, edge.target) for n in crossing[edge]] for edge in outgoing},
        {edge: [program.input_gradients.get(n) for n in crossing[edge]] for edge in incoming},
    )


def _names_on(edges: EdgeNames) -> list[str]:
    """Returns the names of the variables on all edges, without the Nones."""
    return [name for names in edges.values() for name in names if name is not None]


class _SavedValues(NamedTuple):
    """What a stage saves of a micro-batch for its backward.

    Attributes:
        variables: The saved tensors, by the names of their variables; of some only the shape.
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
        """Creates one object for all stages of this process.

        Args:
            runners: The programs of each stage of this process.
            streams: The random streams of the stages.
        """
        self._runners = runners
        self._streams = streams
        self._saved: dict[tuple[int, int], _SavedValues] = {}
        self._feed: Feed = _nothing_fed
        self._first_micro_batch = 0
        self.fetched: dict[int, dict[int, np.ndarray]] = {}

    def begin(self, feed: Feed, first_micro_batch: int) -> None:
        """Starts a batch, whose micro-batch 0 has the global number ``first_micro_batch``."""
        self._feed, self._first_micro_batch = feed, first_micro_batch
        self._saved.clear()
        self.fetched = {}

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        """Runs the forward on the values of incoming edges and the feed; returns those to send."""
        runner = self._runners[stage]
        for edge, tensors in runner.inputs.items():
            for tensor, value in zip(tensors, inputs[edge]):
                static.share_data(tensor, value.get_tensor())
        for name, tensor in runner.fed:
            self._feed(name, micro_batch - self._first_micro_batch, tensor)
        with self._streams.at_stream_of(stage):
            runner.run_forward([], False)
        for number, tensor in runner.fetched.items():
            self.fetched.setdefault(number, {})[micro_batch] = np.array(tensor)
        outputs = {
            edge: tuple(map(static.dynamic_tensor, tensors))
            for edge, tensors in runner.outputs.items()
        }
        shapes = {
            edge: [(tensor.shape, tensor.dtype) for tensor in tensors]
            for edge, tensors in outputs.items()
        }
        saved = {
            name: tensor.shape() if shape_only else static.save_data(tensor)
            for name, tensor, shape_only in runner.saved
        }
        self._saved[stage, micro_batch] = _SavedValues(saved, shapes)
        for tensor in runner.after_forward:
            static.free_memory(tensor)
        return outputs

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """Runs the full backward; adds up parameters' gradients, returns those of the inputs."""
        runner = self._runners[stage]
        grads = self._differentiate(runner, runner.backward, (stage, micro_batch), output_grads)
        for tensor in runner.after_backward:
            static.free_memory(tensor)
        return grads

    def input_grad(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """Runs the half of a split backward for the inputs, whose gradients it returns.

        It saves what :meth:`weight_grad` takes.
        """
        runner, key = self._runners[stage], (stage, micro_batch)
        grads = self._differentiate(runner, runner.input_grad, key, output_grads)
        saved = self._saved[key].variables
        for_weights = {
            name: saved[name] if name in saved else static.save_data(tensor)
            for name, tensor in runner.weight_grad.saved
        }
        self._saved[key] = _SavedValues(for_weights, {})
        for tensor in runner.after_backward:
            static.free_memory(tensor)
        return grads

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        """Runs the half of a split backward that adds up the gradients of the parameters."""
        weight_grad = self._runners[stage].weight_grad
        if weight_grad.run is not None:
            self._put_back(weight_grad, self._saved[stage, micro_batch])
            weight_grad.run([], False)
            for _, tensor in weight_grad.saved:
                static.free_memory(tensor)

    def _differentiate(
        self,
        runner: ProgramRunner,
        backward: BackwardRunner,
        key: tuple[int, int],
        output_grads: Values,
    ) -> Values:
        """Runs a backward, or its half for the inputs; returns the inputs' gradients by edge.

        Args:
            runner: The programs of the stage.
            backward: The program to run.
            key: The stage and the micro-batch.
            output_grads: The gradients of the outgoing values, by edge.
        """
        if backward.run is None:
            return {edge: (None,) * len(tensors) for edge, tensors in runner.inputs.items()}
        saved = self._saved[key]
        self._put_back(backward, saved)
        for edge, tensors in runner.output_grads.items():
            for tensor, grad, (shape, dtype) in zip(
                tensors, output_grads[edge], saved.shapes[edge]
            ):
                if tensor is not None:
                    # None: the loss does not depend on the value by this edge.
                    grad = paddle.zeros(shape, dtype) if grad is None else grad
                    static.share_data(tensor, grad.get_tensor())
        backward.run([], False)
        return {
            edge: tuple(
                None if tensor is None else static.dynamic_tensor(tensor) for tensor in tensors
            )
            for edge, tensors in runner.input_grads.items()
        }

    def _put_back(self, backward: BackwardRunner, saved: _SavedValues) -> None:
        """Puts saved values into the variables that a program of the backward takes."""
        for name, tensor in backward.saved:
            static.restore_data(tensor, saved.variables[name])

    def release(self, stage: int, micro_batch: int) -> None:
        """Drops the saved values of a stage and micro-batch."""
        del self._saved[stage, micro_batch]


def _nothing_fed(name: str, micro_batch: int, tensor: ScopeTensor) -> None:
    """Stands for the feed before the first batch."""
    raise StateError(f"{name!r} is fed outside of a batch")

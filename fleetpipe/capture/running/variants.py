"""Captures a forward for each signature of a batch and each mode, and cuts each run into stages.

Start with ``StagedCaptures``. A run also depends on values that a script may change on the model
between two batches: numbers and functions in attributes, items of lists, dicts and configurations,
sublayers. A mark stands for such a value: it is equal as long as the value is unchanged. The marks
of all values are a fingerprint of the model; when it is a new one, the forward is captured anew.
"""

from __future__ import annotations

import argparse
import functools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.cutting import split_spec
from fleetpipe.capture.cutting.split_spec import Border, values_on_edges
from fleetpipe.capture.repeatability import require_same_modes
from fleetpipe.capture.running.replay import entry_functions
from fleetpipe.capture.tracing.capturing import Capturer, in_mode
from fleetpipe.capture.tracing.signature import Signature
from fleetpipe.capture.tracing.value import Capture, Node, StateRef
from fleetpipe.dygraph.function_code import closure_values, is_of_library, variables_of
from fleetpipe.dygraph.layers.run_stage import StageRunner
from fleetpipe.errors import CaptureError, FleetPipeError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import move_to_new_memory
from fleetpipe.paddle_api.layer import (
    buffers_in,
    has_hooks,
    parameters_in,
    state_slots,
    sublayers_in,
)
from fleetpipe.paddle_api.tensor import is_parameter
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.schedules import Edge

#: The mark of each value on which a forward depends, by the value's name.
Marks = Mapping[str, object]

#: The classes of values that are compared by their value.
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
#: The classes of libraries whose attributes are compared; other objects of libraries are compared
#: by identity.
_CONFIGURATIONS = (argparse.Namespace, SimpleNamespace)
#: The attributes of a partial, a method and a property on which their behaviour depends.
_FUNCTION_ATTRIBUTES = ("func", "args", "keywords", "__func__", "__self__", "fget")
#: A container with more items, or an array with more bytes, is compared by identity.
_LARGEST = 2**16

_log = log.logger(__name__)

#: The key of a captured run: the signature of its batch, whether the model trains, the mode of each
#: of its layers, the numbers of buffers that a forward reads, and the number of the fingerprint.
_RunKey = tuple[Signature, bool, tuple[bool, ...], tuple[bytes, ...], int]

#: The most fingerprints that are kept: a script may switch between several.
_MOST_FINGERPRINTS = 4

#: The most captured runs that are kept.
_MOST_CAPTURES = 256


class SameObject:
    """A reference to an object, equal to other references to the same object only."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        """Stores the object, and so keeps it alive."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def mark_attributes(model: Layer, opens: Callable[[str, Layer], bool]) -> Marks:
    """Returns by name, for each attribute on which a model's forward depends, a mark to compare.

    Marks from two calls are equal as long as the attribute is unchanged. Only attributes of the
    model and of its opened layers count.

    Args:
        model: The model.
        opens: ``opens(path, layer)`` returns whether a layer is opened: its calls are captured one
            by one.
    """
    marks: dict[str, object] = {}
    visited: dict[int, object] = {}
    for path, layer in _layers_in("", model):
        if layer is not model and not opens(path, layer):
            continue
        for name, value in vars(layer).items():
            if name in ("_parameters", "_buffers"):
                # Stages take parameters by name, so only their shapes and dtypes count.
                marks[_join_path(path, name)] = tuple(
                    (key, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
                    for key, tensor in value.items()
                )
            elif name != "training":
                marks[_join_path(path, name)] = _mark_value(value, visited)
        for kind in type(layer).__mro__:
            name = f"class {kind.__qualname__}"
            if name not in marks and not is_of_library(kind):
                marks[name] = _mark_value(vars(kind), visited)
    return marks


def tensor_references(model: Layer) -> dict[str, SameObject]:
    """Returns by name a reference to each parameter and buffer, to detect that one is replaced."""
    return {
        _join_path(path, name): SameObject(tensor)
        for path, layer in _layers_in("", model)
        for name, tensor in chain(parameters_in(layer).items(), buffers_in(layer).items())
        if tensor is not None
    }


def require_same_parameters(
    before: Mapping[str, SameObject], now: Mapping[str, SameObject]
) -> None:
    """Raises an error if a parameter was replaced by another object; buffers may be replaced.

    Args:
        before: References to the parameters and buffers when the stages were made.
        now: References to those of the model now.

    Raises:
        CaptureError: A parameter is another object, or is missing.
    """
    if before == now:
        return
    for name in {**before, **now}:
        tensor: Any = (now.get(name) or before[name]).value
        if before.get(name) != now.get(name) and is_parameter(tensor):
            cause = "it is another parameter, which no stage and no optimizer has"
            raise unfitting_change_error(name, cause if name in now else "it is there no more")


def unfitting_change_error(name: str, cause: str) -> CaptureError:
    """Returns the error for a change of the value ``name`` that does not fit the stages."""
    return CaptureError(
        f"{name!r} has changed on the model, and does not fit the stages that were made of it",
        where=name,
        cause=cause,
        fix="change it before fleetpipe.pipeline is called; or go on with a new model: load "
        "pipe.full_state_dict() into it, then change it, and make its pipeline and its optimizer",
    )


def _layers_in(path: str, layer: Layer) -> Iterator[tuple[str, Layer]]:
    """Yields path and layer, for a layer and all layers in it; for a shared layer each path."""
    yield path, layer
    for name, sublayer in sublayers_in(layer).items():
        if sublayer is not None:
            yield from _layers_in(_join_path(path, name), sublayer)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _mark_value(value: Any, visited: dict[int, object]) -> object:
    """Returns a mark that stays equal while an attribute's value, with all in it, is unchanged.

    ``visited`` has, by id, the values that have a mark already. They are left out, and kept alive.
    """
    if isinstance(value, _NUMBERS):
        return type(value), value if value == value else "nan"  # since NaN is unequal to itself
    if isinstance(value, paddle.Tensor):
        return SameObject(value), value.inplace_version
    if id(value) in visited:
        return None
    visited[id(value)] = value
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _LARGEST:
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        if len(value) > _LARGEST:
            return SameObject(value), len(value)
        items = value.items() if isinstance(value, Mapping) else value
        marks = tuple(_mark_value(item, visited) for item in items)
        return type(value), frozenset(marks) if isinstance(value, (set, frozenset)) else marks
    return SameObject(value), tuple(_mark_value(part, visited) for part in _dependencies_of(value))


def _dependencies_of(value: Any) -> Iterator[object]:
    """Yields the objects on which the behaviour of a user's object or function depends.

    For a function these are the defaults and the variables that it reads, for any other object the
    attributes; for modules, classes, layers and objects of libraries nothing.
    """
    if isinstance(value, (functools.partial, MethodType, property, staticmethod, classmethod)):
        yield from (getattr(value, name, None) for name in _FUNCTION_ATTRIBUTES)
    elif isinstance(value, (ModuleType, type, paddle.nn.Layer)) or (
        is_of_library(value) and not isinstance(value, _CONFIGURATIONS)
    ):
        return
    elif isinstance(value, FunctionType):
        yield from (*closure_values(value), *variables_of(value).values())
    else:
        yield from (getattr(value, name, None) for name in getattr(value, "__slots__", ()))
        yield getattr(value, "__dict__", None)


class StagedCapture(NamedTuple):
    """One captured run of the forward, cut into stages.

    Attributes:
        trace: The capture of the run.
        starts: The number of the first node of each stage after stage 0.
        functions: The functions of the inputs, of the nodes, and of the outputs.
        runner: Runs the functions of a stage.
        crossing: The names of the values on each edge between two stages.
        written: For each stage, the tensors that its nodes write into and backward may need.
    """

    trace: Capture
    starts: tuple[int, ...]
    functions: Sequence[Callable[[Nest], Nest]]
    runner: StageRunner
    crossing: dict[Edge, tuple[str, ...]]
    written: tuple[tuple[StateRef, ...], ...]

    def move_written_tensors(self, stage: int) -> None:
        """Moves the tensors that a stage writes into to new memory, before a micro-batch.

        The graphs of earlier micro-batches keep the old memory until their backward.
        """
        for ref in self.written[stage]:
            move_to_new_memory(ref.tensor)

    def nodes(self, stage: int) -> Sequence[Node]:
        """Returns the nodes of a stage."""
        bounds = [0, *self.starts, len(self.trace.nodes)]
        return self.trace.nodes[bounds[stage] : bounds[stage + 1]]

    def layers(self, stage: int) -> dict[int, Layer]:
        """Returns the layers that a stage calls, each by the index of the function that first does.

        The index is one in :attr:`functions`, of which the first takes the inputs.
        """
        first = self.starts[stage - 1] if stage else 0
        layers: dict[int, tuple[int, Layer]] = {}
        for number, node in enumerate(self.nodes(stage), first + 1):
            if node.is_layer:
                layers.setdefault(id(node.function), (number, node.function))
        return dict(layers.values())


class StagedCaptures:
    """Captures runs of a forward when they are needed, cuts them into stages, and caches them.

    Attributes:
        capturer: Runs the forward.
        example_signature: The signature of the example.
        users: For each parameter or buffer, by name, the stages that have it; empty before there
            are stages.
        stages: The number of stages.
    """

    def __init__(
        self,
        capturer: Capturer,
        borders: Sequence[Border],
        interval: int = 0,
        recompute: Collection[int] = (),
    ) -> None:
        """Captures the example in both modes.

        Args:
            capturer: Runs the forward. The edges of the pipeline are those of its example.
            borders: The borders between the stages.
            interval: Number of nodes that are recomputed together; 0 recomputes none.
            recompute: The indices of functions each of which is recomputed by itself.
        """
        self.capturer = capturer
        self._borders = borders
        self._interval, self._recompute = interval, recompute
        self.example_signature = capturer.example_signature
        self.users: Mapping[str, Sequence[int]] = {}
        self.stages = len(borders) + 1
        self._layers = capturer.model.sublayers(include_self=True)
        self._captures: dict[_RunKey, StagedCapture] = {}
        #: The buffers whose numbers any run has read, by name.
        self._numbers: dict[str, StateRef] = {}
        #: Marks of the values on which the forward depends, by number; the last are current.
        self._fingerprints: dict[int, Marks] = {}
        self._count = count()
        self._examples: dict[bool, StagedCapture] = {}
        for training in (True, False):
            with in_mode(capturer.model, training):
                self.detect_change()
                staged = self._examples[training] = self._capture(self.example_signature, training)
                self._captures[self._key(self.example_signature, training)] = staged

    def detect_change(self) -> str | None:
        """Compares the model's attributes with those of earlier batches, at the begin of a batch.

        Thus changes of a script to the model take effect: the forward is captured anew.

        Returns:
            The name of the first changed value, if the attributes are new; None if they are
            unchanged, or as they were in an earlier batch.
        """
        marks, current = self._current_marks(), next(reversed(self._fingerprints), None)
        if current is None:
            self._fingerprints[next(self._count)] = marks
            return None
        if self._fingerprints[current] == marks:
            return None
        before = self._fingerprints[current]
        name = next(name for name in {**marks, **before} if before.get(name) != marks.get(name))
        self.capturer.forget_captures()
        self._layers = self.capturer.model.sublayers(include_self=True)
        for number, fingerprint in self._fingerprints.items():
            if fingerprint == marks:
                self._fingerprints[number] = self._fingerprints.pop(number)
                return None
        # Marks are made anew, since a layer with a new hook is not opened any more.
        self._fingerprints[next(self._count)] = self._current_marks()
        if len(self._fingerprints) > _MOST_FINGERPRINTS:
            oldest = next(iter(self._fingerprints))
            del self._fingerprints[oldest]
            self._captures = {
                key: staged for key, staged in self._captures.items() if key[-1] != oldest
            }
        return name

    @property
    def fingerprint_number(self) -> int:
        """The number that stands for the model's present attributes, equal if they are equal."""
        return next(reversed(self._fingerprints))

    def _current_marks(self) -> Marks:
        """Returns the marks of the model's attributes, which are equal if the attributes are."""
        return mark_attributes(self.capturer.model, self.capturer.unopened.opens)

    def for_batch(self, signature: Signature, training: bool) -> StagedCapture:
        """Returns the captured run for a batch with this signature, in the layers' current modes.

        Raises:
            CaptureError: A value is on an edge that the example does not have.
        """
        key = self._key(signature, training)
        staged = self._captures.pop(key, None)
        if staged is None:
            if len(self._captures) >= _MOST_CAPTURES:
                log.once(
                    _log.warning,
                    f"batches had {_MOST_CAPTURES} forms by now, and each new one costs a forward "
                    "on each rank: pad texts to a few lengths, and bring images to a few sizes",
                )
                # The captured run that has not been used for longest.
                oldest = next(iter(self._captures))
                del self._captures[oldest]
                self.capturer.first_batches.pop(oldest[0], None)
            staged = self._capture(signature, training)
            new_edges = staged.crossing.keys() - self.of_example(training).crossing.keys()
            if new_edges:
                raise CaptureError(
                    "a batch has a value on an edge that the example has not",
                    expected=f"inputs like {self.example_signature}",
                    got=f"{signature}, with the edges {', '.join(map(str, sorted(new_edges)))}",
                    fix="pass example_inputs in which everything is given that may be",
                )
            self._require_own_tensors(staged)
            # The new run may have read further numbers, which are part of the key.
            key = self._key(signature, training)
        self._captures[key] = staged
        return staged

    def _require_own_tensors(self, staged: StagedCapture) -> None:
        """Raises an error if a stage uses a parameter or buffer that only other stages have."""
        for stage in range(self.stages):
            for name in sorted(frozenset().union(*(node.state for node in staged.nodes(stage)))):
                if stage not in self.users.get(name, (stage,)):
                    raise CaptureError(
                        f"stage {stage} uses {name!r}, as it did not before",
                        cause="in this batch the forward takes it elsewhere than in example_inputs",
                        fix="pass example_inputs for which the forward uses everything, or cut so "
                        f"that its use comes to stage {self.users[name][0]}",
                    )

    def require_same_stages(self, change: str) -> None:
        """Captures the example anew, after the model's attribute named ``change`` has changed.

        Raises:
            CaptureError: A stage uses a parameter or buffer that only other stages have.
        """
        begin = time.perf_counter()
        try:
            staged = self.for_batch(self.example_signature, self.capturer.model.training)
        except FleetPipeError as error:
            # So the next batch raises the error again.
            self._fingerprints.popitem()
            raise unfitting_change_error(change, str(error).partition("\n")[0]) from error
        self.warn_left_out(staged)
        log.once(
            _log.info,
            f"{change!r} has changed on the model: its forward was captured anew, which took "
            f"{time.perf_counter() - begin:.2g} s; what changes in each step is free in a buffer",
        )

    def warn_left_out(self, staged: StagedCapture) -> None:
        """Logs a warning for each action of the model's own code that no stage repeats."""
        model = self.capturer.model
        hooks = [f"it calls a hook of {type(model).__name__}'s own"] if has_hooks(model) else []
        for text in (*staged.trace.left_out, *hooks):
            log.once(_log.warning, f"the captured stages leave out what the forward does: {text}")

    @property
    def numbers(self) -> list[Tensor]:
        """The buffers whose numbers Python code has read in some captured run."""
        return [ref.tensor for ref in self._numbers.values()]

    def of_example(self, training: bool) -> StagedCapture:
        """Returns the captured run of the example, in training or in evaluation."""
        return self._examples[training]

    def _key(self, signature: Signature, training: bool) -> _RunKey:
        """Returns the key in the cache of a batch's run, in the layers' current modes."""
        modes = tuple([layer.training for layer in self._layers])
        # Most models have no such buffers: then there is no call for each micro-batch.
        numbers = (
            tuple([ref.tensor.numpy().tobytes() for ref in self._numbers.values()])
            if self._numbers
            else ()
        )
        return signature, training, modes, numbers, self.fingerprint_number

    def _capture(self, signature: Signature, training: bool) -> StagedCapture:
        """Captures a run for a batch with this signature, and cuts it into stages."""
        trace = self.capturer(signature, training)
        # Values that the run itself has changed are no change by the script.
        number, _ = self._fingerprints.popitem()
        self._fingerprints[number] = self._current_marks()
        self._numbers.update((ref.path, ref) for ref in trace.numbers)
        if trace.switched:
            with in_mode(self.capturer.model, training):
                for mode in trace.switched:
                    mode.put_back()
                require_same_modes(trace, self.capturer(signature, training))
        example = self._examples.get(training)
        starts = tuple(split_spec.find_starts(trace, self._borders, example and example.trace))
        functions = entry_functions(trace, signature)
        infos = tuple(LayerInfo(str(getattr(f, "__name__", ""))) for f in functions)
        bounds = (0, *(start + 1 for start in starts), len(functions))
        partition = Partition(bounds, "captured", infos, may_be_empty=True)
        runner = StageRunner(dict(enumerate(functions)), partition, self._interval, self._recompute)
        edges = values_on_edges(trace, starts, example.crossing if example else ())
        written = _written_tensors(trace, starts)
        staged = StagedCapture(trace, starts, functions, runner, edges, written)
        if self._interval or self._recompute:
            _require_recomputable(staged)
        return staged


def _written_tensors(trace: Capture, starts: Sequence[int]) -> tuple[tuple[StateRef, ...], ...]:
    """Returns for each stage the tensors that its nodes write into and backward may need.

    ``starts`` has the number of the first node of each stage after stage 0.
    """
    names: list[set[str]] = [set() for _ in (0, *starts)]
    for number, node in enumerate(trace.nodes):
        if not _is_plain_training_layer(node):
            names[bisect_right(starts, number)] |= node.state & trace.changed.keys()
    return tuple(tuple(trace.changed[name] for name in sorted(group)) for group in names)


def _is_plain_training_layer(node: Node) -> bool:
    """Returns whether a node is a layer of Paddle's in training, without hooks.

    Such a layer may write statistics, as BatchNorm does, and its backward does not need them.
    """
    layer: Layer = node.function
    return (
        node.is_layer
        and not has_hooks(layer)
        and type(layer).__module__.startswith("paddle.nn.")
        and all(mode.training for mode in node.modes)
    )


def _require_recomputable(staged: StagedCapture) -> None:
    """Raises an error if the forward switches modes of layers, or writes state that others read.

    Nodes that run again in backward would find what other micro-batches have left there.

    Raises:
        CaptureError: A written parameter or buffer is used by several nodes, or is no state of its
            layer; or the forward switches modes.
    """
    if staged.trace.switched:
        raise CaptureError(
            "the forward switches layers between training and evaluation, and nodes are computed "
            "again",
            where=staged.trace.switched_at,
            fix="set recompute_interval=0",
        )
    for ref in chain.from_iterable(staged.written):
        name = ref.path
        users = [node for node in staged.trace.nodes if name in node.state]
        state_names = {name for _, name in state_slots(ref.layer)}
        # weight_norm writes the same numbers into a trained weight each time. If they differ, the
        # check that the second run repeats the first one raises an error.
        is_trained = not ref.tensor.stop_gradient
        if len(users) == 1 and users[0].is_layer and is_trained:
            continue
        if len(users) > 1 or ref.name not in state_names:
            raise CaptureError(
                f"the forward writes into {name!r}, and nodes are computed again",
                where=f"{users[-1].name}, {users[-1].location}",
                cause="the second time they would find what other micro-batches have left there",
                fix="set recompute_interval=0; or write into a buffer in the layer alone that has "
                "it and uses it",
            )

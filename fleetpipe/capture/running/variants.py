"""The captured runs of a forward, by the signature of a batch and by mode, each cut into stages.

Start with ``Forms``. A run also depends on values that a script may change on the model between two
batches: numbers and functions in attributes, entries of lists, dicts and configurations, sublayers.
``attributes_of`` returns marks of these values; when a mark differs, the forward is captured anew.
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
from fleetpipe.capture.cutting.split_spec import Border, crossing
from fleetpipe.capture.repeatability import require_same_modes
from fleetpipe.capture.running.replay import entries
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.signature import Signature
from fleetpipe.capture.tracing.value import Capture, Node, Owned
from fleetpipe.dygraph.function_code import held_by, is_of_library, variables_of
from fleetpipe.dygraph.layers.run_stage import StageRunner
from fleetpipe.errors import CaptureError, FleetPipeError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import renew
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

#: By the name of a value, a mark that is equal as long as the value is unchanged.
Marks = Mapping[str, object]

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
#: The classes of libraries whose attributes are compared; other objects of libraries are compared
#: by identity.
_CONFIGURATIONS = (argparse.Namespace, SimpleNamespace)
#: The attributes of a partial, a method and a property.
_WITHIN = ("func", "args", "keywords", "__func__", "__self__", "fget")
#: A container with more items, or an array with more bytes, is compared by identity.
_LARGEST = 2**16

_log = log.logger(__name__)

#: A signature, whether the model trains, the mode of each of its layers, the numbers of buffers
#: that a forward reads, and the number of the current fingerprint.
_Key = tuple[Signature, bool, tuple[bool, ...], tuple[bytes, ...], int]

#: The most fingerprints that are kept: a script may switch between several.
_MOST = 4

#: The most captured runs that are kept.
_MOST_FORMS = 256


class Same:
    """A reference to an object, equal only to references to the same object."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        """Stores the object, and so keeps it alive."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def attributes_of(model: Layer, opens: Callable[[str, Layer], bool]) -> Marks:
    """Returns marks of the values on which the forwards of opened layers depend.

    Args:
        model: The model.
        opens: ``opens(path, layer)`` returns whether a layer's forward is captured; layers that are
            single nodes are left out.
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
                marks[_join_path(path, name)] = _mark(value, visited)
        for kind in type(layer).__mro__:
            name = f"class {kind.__qualname__}"
            if name not in marks and not is_of_library(kind):
                marks[name] = _mark(vars(kind), visited)
    return marks


def tensors_of(model: Layer) -> dict[str, Same]:
    """Returns a reference to each parameter and buffer, by name."""
    return {
        _join_path(path, name): Same(tensor)
        for path, layer in _layers_in("", model)
        for name, tensor in chain(parameters_in(layer).items(), buffers_in(layer).items())
        if tensor is not None
    }


def difference(before: Marks, now: Marks) -> str:
    """Returns the first name whose mark has changed."""
    return next(name for name in {**now, **before} if before.get(name) != now.get(name))


def require_same_parameters(before: Mapping[str, Same], now: Mapping[str, Same]) -> None:
    """Raises an error if a parameter was replaced by another object; buffers may be replaced."""
    for name in {**before, **now} if before != now else ():
        tensor: Any = (now.get(name) or before[name]).value
        if before.get(name) != now.get(name) and is_parameter(tensor):
            cause = "it is another parameter, which no stage and no optimizer has"
            raise unfitting(name, cause if name in now else "it is there no more")


def unfitting(name: str, cause: str) -> CaptureError:
    """Returns the error for a change of the plain model that does not fit the stages."""
    return CaptureError(
        f"{name!r} has changed on the model, and does not fit the stages that were made of it",
        where=name,
        cause=cause,
        fix="change it before fleetpipe.pipeline is called; or go on with a new model: load "
        "pipe.full_state_dict() into it, then change it, and make its pipeline and its optimizer",
    )


def _layers_in(path: str, layer: Layer) -> Iterator[tuple[str, Layer]]:
    """Yields a layer and all layers within, with their paths; a shared layer at each path."""
    yield path, layer
    for name, sublayer in sublayers_in(layer).items():
        if sublayer is not None:
            yield from _layers_in(_join_path(path, name), sublayer)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _mark(value: Any, visited: dict[int, object]) -> object:
    """Returns a mark that is equal as long as a value, with all that it contains, is unchanged."""
    if isinstance(value, _NUMBERS):
        return type(value), value if value == value else "nan"
    if isinstance(value, paddle.Tensor):
        return Same(value), value.inplace_version
    if id(value) in visited:
        return None
    visited[id(value)] = value
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _LARGEST:
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        if len(value) > _LARGEST:
            return Same(value), len(value)
        items = value.items() if isinstance(value, Mapping) else value
        marks = tuple(_mark(item, visited) for item in items)
        return type(value), frozenset(marks) if isinstance(value, (set, frozenset)) else marks
    return Same(value), tuple(_mark(part, visited) for part in _parts_of(value))


def _parts_of(value: Any) -> Iterator[object]:
    """Yields the parts of a user's object or function on which its behaviour depends."""
    if isinstance(value, (functools.partial, MethodType, property, staticmethod, classmethod)):
        yield from (getattr(value, name, None) for name in _WITHIN)
    elif isinstance(value, (ModuleType, type, paddle.nn.Layer)) or (
        is_of_library(value) and not isinstance(value, _CONFIGURATIONS)
    ):
        return
    elif isinstance(value, FunctionType):
        yield from (*held_by(value), *variables_of(value).values())
    else:
        yield from (getattr(value, name, None) for name in getattr(value, "__slots__", ()))
        yield getattr(value, "__dict__", None)


class Form(NamedTuple):
    """One captured run of the forward, cut into stages.

    Attributes:
        trace: The capture of the run.
        starts: The first node of each stage after stage 0.
        functions: The functions of the inputs, of the nodes, and of the outputs.
        runner: Runs the stages.
        crossing: The names of the values on each edge.
        written: By stage, the tensors that its nodes write into.
    """

    trace: Capture
    starts: tuple[int, ...]
    functions: Sequence[Callable[[Nest], Nest]]
    runner: StageRunner
    crossing: dict[Edge, tuple[str, ...]]
    written: tuple[tuple[Owned, ...], ...]

    def renew(self, stage: int) -> None:
        """Moves the tensors that a stage writes into to new memory, before a micro-batch.

        The graphs of earlier micro-batches keep the old memory until their backward.
        """
        for owned in self.written[stage]:
            renew(getattr(owned.layer, owned.name))

    def nodes(self, stage: int) -> Sequence[Node]:
        """Returns the nodes of a stage."""
        bounds = [0, *self.starts, len(self.trace.nodes)]
        return self.trace.nodes[bounds[stage] : bounds[stage + 1]]

    def layers(self, stage: int) -> dict[int, Layer]:
        """Returns the layers that are nodes of a stage, each by the number of its first call.

        The numbers are indices of ``functions``, of which the first takes the inputs.
        """
        first = self.starts[stage - 1] if stage else 0
        layers: dict[int, tuple[int, Layer]] = {}
        for number, node in enumerate(self.nodes(stage), first + 1):
            if node.is_layer:
                layers.setdefault(id(node.function), (number, node.function))
        return dict(layers.values())


class Forms:
    """Captures runs of a forward when they are needed, and caches them."""

    def __init__(
        self,
        capturing: Capturing,
        borders: Sequence[Border],
        interval: int = 0,
        recompute: Collection[int] = (),
    ) -> None:
        """Captures runs for the example, in both modes.

        Args:
            capturing: Runs the forward. The edges of the pipeline are those of its example.
            borders: The borders of the stages.
            interval: Number of nodes that are recomputed together; 0 recomputes none.
            recompute: The numbers of functions each of which is recomputed by itself.
        """
        self.capturing = capturing
        self._borders = borders
        self._interval, self._recompute = interval, recompute
        self.first = capturing.look
        #: By name, the stages that have a parameter or buffer; empty before there are stages.
        self.users: Mapping[str, Sequence[int]] = {}
        self.stages = len(borders) + 1
        self._layers = capturing.model.sublayers(include_self=True)
        self._forms: dict[_Key, Form] = {}
        #: The buffers whose numbers any run has read, by name.
        self._numbers: dict[str, Owned] = {}
        #: Marks of the values on which the forward depends, by number; the last are current.
        self._fingerprints: dict[int, Marks] = {}
        self._count = count()
        self._examples: dict[bool, Form] = {}
        for training in (True, False):
            with in_mode(capturing.model, training):
                self.follow()
                form = self._examples[training] = self._capture(self.first, training)
                self._forms[self._key(self.first, training)] = form

    def follow(self) -> str | None:
        """Returns the name of the first value that has changed to an unknown one; None if none has.

        It is called at the begin of a batch, so that changes of a script to the model take effect.
        """
        marks, current = self._marks(), next(reversed(self._fingerprints), None)
        if current is None:
            self._fingerprints[next(self._count)] = marks
            return None
        if self._fingerprints[current] == marks:
            return None
        name = difference(self._fingerprints[current], marks)
        self.capturing.forget()
        self._layers = self.capturing.model.sublayers(include_self=True)
        for number, fingerprint in self._fingerprints.items():
            if fingerprint == marks:
                self._fingerprints[number] = self._fingerprints.pop(number)
                return None
        # Marks are made anew, since a layer with a new hook is not opened any more.
        self._fingerprints[next(self._count)] = self._marks()
        if len(self._fingerprints) > _MOST:
            oldest = next(iter(self._fingerprints))
            del self._fingerprints[oldest]
            self._forms = {key: form for key, form in self._forms.items() if key[-1] != oldest}
        return name

    @property
    def number(self) -> int:
        """The number of the current fingerprint."""
        return next(reversed(self._fingerprints))

    def _marks(self) -> Marks:
        return attributes_of(self.capturing.model, self.capturing.unopened.opens)

    def of(self, signature: Signature, training: bool) -> Form:
        """Returns the run for a batch with this signature, in the current modes.

        Raises:
            CaptureError: A value is on an edge that the example does not have.
        """
        key = self._key(signature, training)
        form = self._forms.pop(key, None)
        if form is None:
            self._make_room()
            form = self._capture(signature, training)
            new = form.crossing.keys() - self.example(training).crossing.keys()
            if new:
                raise CaptureError(
                    "a batch of this look has a value on an edge that the example has not",
                    expected=f"inputs like {self.first}",
                    got=f"{signature}, with the edges {', '.join(map(str, sorted(new)))}",
                    fix="pass example_inputs in which everything is given that may be",
                )
            self._require_own_tensors(form)
            # The new run may have read further numbers, which are part of the key.
            key = self._key(signature, training)
        self._forms[key] = form
        return form

    def _make_room(self) -> None:
        """Drops the run that has not been used for longest, if there are many."""
        if len(self._forms) >= _MOST_FORMS:
            log.once(
                _log.warning,
                f"batches had {_MOST_FORMS} forms by now, and each new one costs a forward on each "
                "rank: pad texts to a few lengths, and bring images to a few sizes",
            )
            oldest = next(iter(self._forms))
            del self._forms[oldest]
            self.capturing.samples.pop(oldest[0], None)

    def _require_own_tensors(self, form: Form) -> None:
        """Raises an error if a stage uses a parameter or buffer that only other stages have."""
        for stage in range(self.stages):
            for name in sorted(frozenset().union(*(node.state for node in form.nodes(stage)))):
                if stage not in self.users.get(name, (stage,)):
                    raise CaptureError(
                        f"stage {stage} uses {name!r}, as it did not before",
                        cause="in this batch the forward takes it elsewhere than in example_inputs",
                        fix="pass example_inputs for which the forward uses everything, or cut so "
                        f"that its use comes to stage {self.users[name][0]}",
                    )

    def require_same_stages(self, change: str) -> None:
        """Captures a model anew, whose value ``change`` has changed.

        Raises:
            CaptureError: A stage uses a tensor that it does not have.
        """
        begin = time.perf_counter()
        try:
            form = self.of(self.first, self.capturing.model.training)
        except FleetPipeError as error:
            # So the next batch raises the error again.
            self._fingerprints.popitem()
            raise unfitting(change, str(error).partition("\n")[0]) from error
        self.tell(form)
        log.once(
            _log.info,
            f"{change!r} has changed on the model: its forward was captured anew, which took "
            f"{time.perf_counter() - begin:.2g} s; what changes in each step is free in a buffer",
        )

    def tell(self, form: Form) -> None:
        """Logs warnings of what the model's own code does that no stage repeats."""
        model = self.capturing.model
        hooks = [f"it calls a hook of {type(model).__name__}'s own"] if has_hooks(model) else []
        for text in (*form.trace.left_out, *hooks):
            log.once(_log.warning, f"the captured stages leave out what the forward does: {text}")

    @property
    def numbers(self) -> list[Tensor]:
        """The buffers whose numbers Python reads in some run."""
        return [getattr(owned.layer, owned.name) for owned in self._numbers.values()]

    def example(self, training: bool) -> Form:
        """Returns the run of the example."""
        return self._examples[training]

    def _key(self, signature: Signature, training: bool) -> _Key:
        modes = tuple([layer.training for layer in self._layers])
        # Most models have no such buffers, for which `map` makes no call.
        numbers = tuple(map(_bytes_of, self._numbers.values()))
        return signature, training, modes, numbers, self.number

    def _capture(self, signature: Signature, training: bool) -> Form:
        """Captures a run, and cuts it into stages."""
        trace = self.capturing(signature, training)
        # Values that the run itself has changed are no change by the script.
        number, _ = self._fingerprints.popitem()
        self._fingerprints[number] = self._marks()
        self._numbers.update((owned.path, owned) for owned in trace.numbers)
        if trace.switched:
            require_same_modes(trace, self.capturing.after(trace, signature, training))
        example = self._examples.get(training)
        starts = tuple(split_spec.starts(trace, self._borders, example and example.trace))
        functions = entries(trace, signature)
        infos = tuple(LayerInfo(str(getattr(f, "__name__", ""))) for f in functions)
        bounds = (0, *(start + 1 for start in starts), len(functions))
        partition = Partition(bounds, "captured", infos, may_be_empty=True)
        runner = StageRunner(dict(enumerate(functions)), partition, self._interval, self._recompute)
        edges = crossing(trace, starts, example.crossing if example else ())
        form = Form(trace, starts, functions, runner, edges, _written_tensors(trace, starts))
        if self._interval or self._recompute:
            _require_recomputable(form)
        return form


def _written_tensors(trace: Capture, starts: Sequence[int]) -> tuple[tuple[Owned, ...], ...]:
    """Returns, for each stage, the tensors that its nodes write into and backward may need."""
    names: list[set[str]] = [set() for _ in (0, *starts)]
    for number, node in enumerate(trace.nodes):
        if not _normalizes(node):
            names[bisect_right(starts, number)] |= node.state & trace.changed.keys()
    return tuple(tuple(trace.changed[name] for name in sorted(group)) for group in names)


def _normalizes(node: Node) -> bool:
    """Whether a node is a training layer of Paddle's, whose backward needs no statistics."""
    layer: Layer = node.function
    plain = node.is_layer and not has_hooks(layer)
    return (
        plain
        and type(layer).__module__.startswith("paddle.nn.")
        and all(mode.training for mode in node.modes)
    )


def _bytes_of(owned: Owned) -> bytes:
    """Returns the bytes of a buffer's numbers."""
    numbers: bytes = getattr(owned.layer, owned.name).numpy().tobytes()
    return numbers


def _require_recomputable(form: Form) -> None:
    """Raises an error if nodes that are recomputed write into state, or switch modes of layers."""
    if form.trace.switched:
        raise CaptureError(
            "the forward switches layers between training and evaluation, and nodes are computed "
            "again",
            where=form.trace.switched_at,
            fix="set recompute_interval=0",
        )
    for owned in chain.from_iterable(form.written):
        name = owned.path
        users = [node for node in form.trace.nodes if name in node.state]
        kept = {slot for _, slot in state_slots(owned.layer)}
        # weight_norm writes the same numbers into a trained weight each time. If they differ, the
        # check that the second run repeats the first one raises an error.
        is_trained = not getattr(owned.layer, owned.name).stop_gradient
        if len(users) == 1 and users[0].is_layer and is_trained:
            continue
        if len(users) > 1 or owned.name not in kept:
            raise CaptureError(
                f"the forward writes into {name!r}, and nodes are computed again",
                where=f"{users[-1].name}, {users[-1].place}",
                cause="the second time they would find what other micro-batches have left there",
                fix="set recompute_interval=0; or write into a buffer in the layer alone that has "
                "it and uses it",
            )

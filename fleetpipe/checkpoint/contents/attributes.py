"""Compares attributes of layers and of the optimizer after a restart, which no state dict has.

A script may change them in a run: it unfreezes a parameter, puts a norm into evaluation, sets
another ``p`` of a dropout or another ``clip_norm``, or a layer counts its calls. A process that
restarts the script has their first values, and would train other weights from there. A checkpoint
stores a text for each value; start with ``Attributes``.
"""

from __future__ import annotations

import random
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Optimizer
from fleetpipe.checkpoint.contents.model_and_optimizer import unwrap, without_wrappers
from fleetpipe.dygraph.function_code import is_of_library
from fleetpipe.errors import CheckpointError
from fleetpipe.job import attempt_files
from fleetpipe.job.job import required_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import forward_hooks
from fleetpipe.paddle_api.optimizer import clips_of_a_step, dict_groups, groups_of
from fleetpipe.paddle_api.tensor import has_memory

_log = log.logger(__name__)

_SCALARS = (bool, int, float, str, np.number)
#: By the class of a random generator, a function that returns its state.
_GENERATOR_STATES: dict[type, Callable[[Any], bytes]] = {
    random.Random: lambda generator: repr(generator.getstate()).encode(),
    np.random.RandomState: lambda generator: repr(generator.get_state(legacy=False)).encode(),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state).encode(),
}
#: The most characters of a value's text; a longer one is cut, and has a checksum.
_LONGEST = 40
#: Attributes that are not compared: those of every layer, whose modes are compared by themselves,
#: and the one that Paddle's norms set in their first forward.
_NOT_COMPARED = {*vars(paddle.nn.Layer()), "_data_format"}

#: A text for the value of each attribute, by the attribute's fully qualified name.
AttributeTexts = dict[str, str]


class Attributes:
    """Compares the objects' attributes at the first batch of a process with the restored step's.

    The objects are model and optimizer. A run saves :meth:`state`; a run that resumes passes it to
    :meth:`put_back`.
    """

    def __init__(self, model: Any, optimizer: Optimizer = None) -> None:
        """Stores the model and the optimizer."""
        self._model, self._optimizer = model, optimizer
        #: The texts at the begin of this process's first batch; None before it.
        self._first_texts: AttributeTexts | None = None
        self._saved: Mapping[str, AttributeTexts] = {}

    def state(self) -> dict[str, AttributeTexts] | None:
        """Returns the attributes as texts, at the first batch and now; None before that batch."""
        if self._first_texts is None:
            return None
        now = self.now()
        changed = [
            name for name, value in self._first_texts.items() if now.get(name, value) != value
        ]
        if changed:
            text = f"{changed[0]} has changed in the run, and is in no checkpoint: a script that "
            text += "goes on from one must set it before its first batch, or is refused"
            log.once(_log.info, text)
        return {"begun": self._first_texts, "now": now}

    def put_back(self, saved: Mapping[str, AttributeTexts]) -> None:
        """Stores the restored step's result of :meth:`state`, to compare at the first batch."""
        self._saved = saved

    def now(self) -> AttributeTexts:
        """Returns the texts of the attributes as they are now."""
        return dict(_attribute_texts(self._model, self._optimizer))

    def begin_batch(self, optimizer: Optimizer) -> None:
        """Compares the attributes that the script has set with those of the restored step.

        Args:
            optimizer: The optimizer that steps in this batch.

        Raises:
            CheckpointError: This process replaces a rank that had other values.
            ConfigError: The run had changed a value that the script has not changed again; or the
                optimizer that steps is not the saved one.
        """
        if self._optimizer is not None and unwrap(optimizer) is not unwrap(self._optimizer):
            required_job("a batch").allow.refuse(
                "state",
                type(unwrap(optimizer)).__name__,
                "another optimizer steps than the one that checkpoints have",
                fix="pass that one to fleetpipe.resume, the other by state={'other': ..}",
            )
        if self._first_texts is None:
            self._first_texts = self.now()
            self._compare(self._first_texts)

    def _compare(self, now: AttributeTexts) -> None:
        """Raises an error for attributes that the run had changed and the script has not.

        Args:
            now: The texts at the first batch of this process.
        """
        saved, begun = self._saved.get("now", {}), self._saved.get("begun", {})
        changed = {n: value for n, value in now.items() if saved.get(n, value) != value}
        job = required_job("a batch")
        if changed and job.alone:
            name = next(iter(changed))
            why = f"a new process has {name} {changed[name]}, and its rank had {saved[name]}"
            attempt_files.tell_unhealed(why)
            fix = "nothing: the job starts again, where the script may set it by run.step"
            raise CheckpointError(why, fix=fix)
        lost: dict[str, list[str]] = {}
        for name, value in changed.items():
            if begun.get(name) == value:
                lost.setdefault(name.partition("[")[0].rpartition(".")[2], []).append(name)
            else:
                _log.info("%s was %s when it was saved, and is now %s", name, saved[name], value)
        for attribute, (name, *more) in lost.items():
            several = f" (and {len(more)} more {attribute})" if more else ""
            job.allow.refuse(
                "state",
                attribute,
                f"{name}{several} has changed in the run, and begins anew where that goes on",
                expected=f"{saved[name]}, as when the step was saved",
                got=f"{changed[name]}, as when the run began",
                fix="set it before the first batch, by run.step; have a layer count in a buffer",
            )


def _attribute_texts(model: Any, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each attribute of layers, losses, optimizer and clips."""
    model = without_wrappers(model)
    named = model.named_functions() if hasattr(model, "named_functions") else {"": model}
    # Layers, parameters and buffers are compared or restored by other ways.
    seen: set[int] = set()
    for layer in named.values():
        if isinstance(layer, paddle.nn.Layer):
            seen.update(map(id, layer.sublayers(include_self=True)))
            seen.update(map(id, [*layer.parameters(), *layer.buffers()]))
    for name, function in named.items():
        yield from _function_texts(name, function, seen)
    if hasattr(model, "modes_in_training"):
        yield from ((f"{name}.training", str(mode)) for name, mode in model.modes_in_training())
    if optimizer is None:
        return
    base = unwrap(optimizer)
    scalars = {n: v for n, v in vars(base).items() if isinstance(v, _SCALARS)}
    for name in ("_learning_rate", "_sign"):  # one is restored; Rprop sets the other in a step
        scalars.pop(name, None)
    yield from _value_texts("optimizer", scalars)
    yield "optimizer.groups", str(len(groups_of(base)))  # each rank has other parameters in them
    for number, group in enumerate(dict_groups(base)):
        yield from _value_texts(f"optimizer.{number}", group)
    for number, clip in enumerate(clips_of_a_step(base)):
        stock = getattr(clip, "stock", clip)
        yield f"clip.{number}", type(stock).__name__
        yield from _value_texts(f"clip.{number}", {} if stock is None else vars(stock))


def _function_texts(name: str, function: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each attribute of a layer or function of the model.

    Args:
        name: The name of the layer or function in the model.
        function: The layer, with its sublayers, or the function.
        seen: The ids of objects that are left out; visited ones are added.
    """
    if not isinstance(function, paddle.nn.Layer):
        values = {**getattr(function, "keywords", {}), **getattr(function, "__dict__", {})}
        yield from _value_texts(name, values, seen)
        return
    for path, layer in function.named_sublayers(prefix=name, include_self=True):
        values = {n: v for n, v in vars(layer).items() if n not in _NOT_COMPARED}
        yield from _value_texts(path, {**_class_attributes(layer), **values}, seen)
        yield f"{path}.forward", str(_script_names([values.get("forward", layer.forward)]))
        hooks = (hook for hooks in forward_hooks(layer) for hook in hooks.values())
        yield f"{path}.hooks", str(_script_names(hooks))
        parameters = layer.named_parameters(prefix=path, include_sublayers=False)
        for parameter_name, parameter in parameters:
            yield f"{parameter_name}.stop_gradient", str(parameter.stop_gradient)
            yield from _value_texts(parameter_name, getattr(parameter, "optimize_attr", {}))


def _class_attributes(instance: Any) -> dict[str, Any]:
    """Returns the attributes of the script's own classes of an object, methods left out."""
    bases = [base for base in type(instance).__mro__ if not is_of_library(base)]
    members = {n: v for base in reversed(bases) for n, v in vars(base).items() if n[:2] != "__"}
    return {n: v for n, v in members.items() if not callable(v) and not hasattr(v, "__get__")}


def _value_texts(
    name: str, values: Mapping[str, Any], seen: set[int] | None = None
) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each plain value, and of the parts of other values.

    Args:
        name: The name of the object that has the values as attributes.
        values: The values by attribute.
        seen: The ids of objects that are left out, to which visited ones are added; None leaves out
            all values that are not plain.
    """
    for attribute, value in values.items():
        path = f"{name}.{attribute}".lstrip(".")
        if _is_plain(value):
            text = repr(value)
            if len(text) > _LONGEST:
                text = f"{text[:_LONGEST]}.. ({zlib.crc32(text.encode()):08x})"
            yield path, text
        elif seen is not None and id(value) not in seen:
            seen.add(id(value))
            yield from _object_texts(path, value, seen)


def _object_texts(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yields the name and a text of a value, or of each of its parts; texts change with values.

    Args:
        path: The name of the value.
        value: A value that is not plain; an object of a library's class yields nothing.
        seen: The ids of objects that are left out, to which visited ones are added.
    """
    if isinstance(value, paddle.Tensor):
        if has_memory(value) and value.is_dense():
            yield from _object_texts(path, value.numpy(), seen)
    elif isinstance(value, np.ndarray):
        # With the shape in its name, a table that has grown for a longer input is new, not changed.
        data = np.ascontiguousarray(value).tobytes() if value.dtype != object else b""
        yield f"{path}{[*value.shape]}", f"{value.dtype} ({zlib.crc32(data):08x})"
    elif isinstance(value, (set, frozenset)):
        yield path, str(sorted(map(repr, value)))
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _value_texts("", {f"{path}[{key!r}]": part}, seen)
    elif type(value) in _GENERATOR_STATES:
        yield (
            path,
            f"{type(value).__name__} ({zlib.crc32(_GENERATOR_STATES[type(value)](value)):08x})",
        )
    elif isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        yield from ((path, name) for name in _script_names([value]))
    elif isinstance(value, paddle.nn.Layer):
        yield from _object_texts(path, value.state_dict(), seen)
    elif not is_of_library(type(value)):
        yield from _value_texts(
            path, {**_class_attributes(value), **getattr(value, "__dict__", {})}, seen
        )


def _script_names(functions: Iterable[Any]) -> list[str]:
    """Returns the qualified names of those functions that are not of a library."""
    script_functions = (function for function in functions if not is_of_library(function))
    return [str(getattr(f, "__qualname__", type(f).__qualname__)) for f in script_functions]


def _is_plain(value: Any) -> bool:
    """Returns whether a value consists of numbers and texts, in lists, tuples and dicts."""
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _SCALARS)

"""What the objects of a run look like: their attributes, which no state dict has.

A script may change them in a run: it unfreezes a parameter, puts a norm into evaluation, sets
another ``p`` of a dropout or another ``clip_norm``, or a layer counts its calls. A process that
runs the script anew has them as they were at first, and would train other weights from there.
"""

from __future__ import annotations

import random
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Layer, Optimizer
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
#: The states of generators of the script's own.
_STATES: dict[type, Callable[[Any], bytes]] = {
    random.Random: lambda generator: repr(generator.getstate()).encode(),
    np.random.RandomState: lambda generator: repr(generator.get_state(legacy=False)).encode(),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state).encode(),
}
#: A longer text is shown by its begin and a checksum.
_LONGEST = 40
#: Those that every layer has, whose modes come by themselves; and what Paddle's norms set in their
#: first forward.
_LEFT_OUT = {*vars(paddle.nn.Layer()), "_data_format"}

#: Texts of values, by the fully qualified name of what has them.
Looks = dict[str, str]


class Attributes:
    """Compares the objects of a run with what they looked like when its last step was saved."""

    def __init__(self, model: Any, optimizer: Optimizer = None) -> None:
        """Takes what is trained."""
        self._model, self._optimizer = model, optimizer
        #: As the first batch of this process began.
        self._begun: Looks | None = None
        self._saved: Mapping[str, Looks] = {}

    def state(self) -> dict[str, Looks] | None:
        """Returns what they look like; None before the first batch."""
        if self._begun is None:
            return None
        now = self.now()
        changed = [name for name, value in self._begun.items() if now.get(name, value) != value]
        if changed:
            text = f"{changed[0]} has changed in the run, and is in no checkpoint: a script that "
            text += "goes on from one must set it before its first batch, or is refused"
            log.once(_log.info, text)
        return {"begun": self._begun, "now": now}

    def put_back(self, saved: Mapping[str, Looks]) -> None:
        """Takes what they looked like when the step was saved that has been restored."""
        self._saved = saved

    def now(self) -> Looks:
        """Returns what they look like."""
        return dict(_looks(self._model, self._optimizer))

    def begin_batch(self, optimizer: Optimizer) -> None:
        """Compares at the first batch; a script has made by then the changes that it makes again.

        Raises:
            CheckpointError: This process replaces a rank, whose objects looked otherwise.
            ConfigError: The run has changed what the script has not changed again; or another
                optimizer steps than the one that is saved.
        """
        if self._optimizer is not None and unwrap(optimizer) is not unwrap(self._optimizer):
            required_job("a batch").allow.refuse(
                "state",
                type(unwrap(optimizer)).__name__,
                "another optimizer steps than the one that checkpoints have",
                fix="pass that one to fleetpipe.resume, the other by state={'other': ..}",
            )
        if self._begun is None:
            self._begun = self.now()
            self._compare(self._begun)

    def _compare(self, now: Looks) -> None:
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


def _looks(model: Any, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Yields the names of attributes of layers, losses, the optimizer and its clips, and values."""
    model = without_wrappers(model)
    named = model.named_functions() if hasattr(model, "named_functions") else {"": model}
    layers = [one for one in named.values() if isinstance(one, paddle.nn.Layer)]
    seen = {id(part) for layer in layers for part in _parts_of(layer)}
    for name, function in named.items():
        yield from _of_function(name, function, seen)
    if hasattr(model, "modes_in_training"):
        yield from ((f"{name}.training", str(mode)) for name, mode in model.modes_in_training())
    if optimizer is None:
        return
    base = unwrap(optimizer)
    scalars = {n: v for n, v in vars(base).items() if isinstance(v, _SCALARS)}
    for name in ("_learning_rate", "_sign"):  # which is restored; which Rprop sets as it steps
        scalars.pop(name, None)
    yield from _texts("optimizer", scalars)
    yield "optimizer.groups", str(len(groups_of(base)))  # of which each rank has its parameters
    for number, group in enumerate(dict_groups(base)):
        yield from _texts(f"optimizer.{number}", group)
    for number, clip in enumerate(clips_of_a_step(base)):
        stock = getattr(clip, "stock", clip)
        yield f"clip.{number}", type(stock).__name__
        yield from _texts(f"clip.{number}", {} if stock is None else vars(stock))


def _parts_of(layer: Layer) -> Iterator[Any]:
    """Yields a layer and what it has of its own, which is compared or restored by other ways."""
    yield from layer.sublayers(include_self=True)
    yield from (*layer.parameters(), *layer.buffers())


def _of_function(name: str, function: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    if not isinstance(function, paddle.nn.Layer):
        values = {**getattr(function, "keywords", {}), **getattr(function, "__dict__", {})}
        yield from _texts(name, values, seen)
        return
    for path, layer in function.named_sublayers(prefix=name, include_self=True):
        values = {n: v for n, v in vars(layer).items() if n not in _LEFT_OUT}
        yield from _texts(path, {**_of_class(layer), **values}, seen)
        yield f"{path}.forward", str(_names_of([values.get("forward", layer.forward)]))
        yield (
            f"{path}.hooks",
            str(_names_of(h for hooks in forward_hooks(layer) for h in hooks.values())),
        )
        for of, parameter in layer.named_parameters(prefix=path, include_sublayers=False):
            yield f"{of}.stop_gradient", str(parameter.stop_gradient)
            yield from _texts(of, getattr(parameter, "optimize_attr", {}))


def _of_class(thing: Any) -> dict[str, Any]:
    """Returns the values that a class of the script's has, which its methods may change."""
    bases = [base for base in type(thing).__mro__ if not is_of_library(base)]
    members = {n: v for base in reversed(bases) for n, v in vars(base).items() if n[:2] != "__"}
    return {n: v for n, v in members.items() if not callable(v) and not hasattr(v, "__get__")}


def _texts(
    name: str, values: Mapping[str, Any], seen: set[int] | None = None
) -> Iterator[tuple[str, str]]:
    """Yields texts of plain values; given what was seen, also of what others are and hold."""
    for attribute, value in values.items():
        path = f"{name}.{attribute}".lstrip(".")
        if _is_plain(value):
            text = repr(value)
            if len(text) > _LONGEST:
                text = f"{text[:_LONGEST]}.. ({zlib.crc32(text.encode()):08x})"
            yield path, text
        elif seen is not None and id(value) not in seen:
            seen.add(id(value))
            yield from _of_value(path, value, seen)


def _of_value(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yields texts of a value that is not plain, or of its parts; none of a library's object."""
    if isinstance(value, paddle.Tensor):
        if has_memory(value) and value.is_dense():
            yield from _of_value(path, value.numpy(), seen)
    elif isinstance(value, np.ndarray):
        # By its shape too: a table that a longer input makes longer is another one.
        data = np.ascontiguousarray(value).tobytes() if value.dtype != object else b""
        yield f"{path}{[*value.shape]}", f"{value.dtype} ({zlib.crc32(data):08x})"
    elif isinstance(value, (set, frozenset)):
        yield path, str(sorted(map(repr, value)))
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _texts("", {f"{path}[{key!r}]": part}, seen)
    elif type(value) in _STATES:
        yield path, f"{type(value).__name__} ({zlib.crc32(_STATES[type(value)](value)):08x})"
    elif isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        yield from ((path, name) for name in _names_of([value]))
    elif isinstance(value, paddle.nn.Layer):
        yield from _of_value(path, value.state_dict(), seen)
    elif not is_of_library(type(value)):
        yield from _texts(path, {**_of_class(value), **getattr(value, "__dict__", {})}, seen)


def _names_of(functions: Iterable[Any]) -> list[str]:
    """Returns the names of those functions that are no library's."""
    scripts = (one for one in functions if not is_of_library(one))
    return [str(getattr(one, "__qualname__", type(one).__qualname__)) for one in scripts]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _SCALARS)

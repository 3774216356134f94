"""What the objects of a run look like: their plain attributes, which no state dict has.

A script may change them in a run: it unfreezes a parameter, puts a norm into evaluation, sets
another ``p`` of a dropout or another ``clip_norm``, or a layer counts its calls. A process that
runs the script anew has them as they were at first, and would train other weights from there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Optimizer
from fleetpipe.checkpoint.contents.layer_and_optimizer import unwrap, without_wrappers
from fleetpipe.errors import CheckpointError
from fleetpipe.job import attempt_files
from fleetpipe.job.job import required_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import clips_of_a_step, dict_groups, groups_of

_log = log.logger(__name__)

_SCALARS = (bool, int, float, str, np.number)
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
                lost.setdefault(name.rpartition(".")[2], []).append(name)
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
    for name, function in named.items():
        yield from _of_function(name, function)
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


def _of_function(name: str, function: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(function, paddle.nn.Layer):
        yield from _texts(
            name, {**getattr(function, "keywords", {}), **getattr(function, "__dict__", {})}
        )
        return
    for path, layer in function.named_sublayers(prefix=name, include_self=True):
        yield from _texts(path, {n: v for n, v in vars(layer).items() if n not in _LEFT_OUT})
        for of, parameter in layer.named_parameters(prefix=path, include_sublayers=False):
            yield f"{of}.stop_gradient", str(parameter.stop_gradient)
            yield from _texts(of, getattr(parameter, "optimize_attr", {}))


def _texts(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for attribute, value in values.items():
        if _is_plain(value):
            text = repr(value)
            if len(text) > _LONGEST:
                text = f"{text[:_LONGEST]}.. ({zlib.crc32(text.encode()):08x})"
            yield f"{name}.{attribute}".lstrip("."), text


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _SCALARS)

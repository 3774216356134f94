"""Reads and checks the configuration of a program: a mapping or a Python file."""

from __future__ import annotations

import difflib
import os
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetpipe.errors import ConfigError, UsageError, is_whole_number, require_whole

#: What a program may give as its configuration.
ConfigSource = Mapping[str, Any] | str | os.PathLike[str]

#: What is read here.
_ENTRIES = ("NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE", "SCHEDULE", "parallel")
#: What ColossalAI reads and this door does not do, and what to do instead.
_ELSEWHERE = {
    "fp16": "leave it out: on CPU Paddle computes in float32; else use strategy.amp of fleet",
    "zero": "leave it out, or use sharding_degree of fleetpipe.fleet",
    "gradient_accumulation": "raise NUM_MICRO_BATCHES: a batch is accumulated over these",
    "gradient_handler": "leave it out: replicas and tied weights are reduced by themselves",
    "clip_grad_norm": "give it to the optimizer: grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)",
}


#: How alike a misspelt name is, of 1: NUM_BATCHES, at 0.79, may be a program's own.
_NEAR = 0.8


class Config(dict[str, Any]):
    """A mapping whose entries can be read as attributes: ``config.BATCH_SIZE``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @classmethod
    def read(cls, source: ConfigSource) -> Config:
        """Reads a configuration and checks what this door uses of it.

        Args:
            source: A mapping, or the path of a Python file that assigns the entries.

        Raises:
            ConfigError: An entry has a value that cannot be used, or the file cannot be read.
            UsageError: ``source`` is neither.
        """
        if isinstance(source, (str, os.PathLike)):
            config = cls(_run_file(Path(source)))
        elif isinstance(source, Mapping):
            config = cls(source)
        else:
            raise UsageError(
                "a configuration is a mapping or the path of a Python file",
                got=repr(source),
                fix="config=dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2))",
            )
        parallel = config.get("parallel") or {}
        _refuse_misspelt(config, (*_ENTRIES, *_ELSEWHERE), "the configuration")
        _refuse_misspelt(parallel, ("pipeline", "tensor", "data"), "parallel")
        for name, fix in _ELSEWHERE.items():
            if config.get(name):
                raise ConfigError(f"{name} is not configured here", got=str(config[name]), fix=fix)
        for name in ("NUM_MICRO_BATCHES", "NUM_CHUNKS"):
            require_whole(name, config.get(name, 1))
        if config.tensor_shape is not None:
            _require_shape(config.tensor_shape)
        if config._degree("tensor") > 1:
            raise ConfigError(
                "parallel['tensor'] is not configured here",
                got=f"{config._degree('tensor')} ranks",
                fix="use mp_degree of fleetpipe.fleet, with its tensor-parallel layers",
            )
        return config

    @property
    def micro_batches(self) -> int:
        """``NUM_MICRO_BATCHES``, the number of micro-batches of a batch; 1 by default."""
        return int(self.get("NUM_MICRO_BATCHES", 1))

    @property
    def tensor_shape(self) -> Sequence[int] | None:
        """``TENSOR_SHAPE``, the shape of values between stages; None for any shape."""
        shape: Sequence[int] | None = self.get("TENSOR_SHAPE")
        return shape

    @property
    def pipeline(self) -> int:
        """Number of ranks of a pipeline; 1 by default."""
        return self._degree("pipeline")

    @property
    def schedule(self) -> str:
        """``SCHEDULE``, which ColossalAI does not have: the schedule by name, 1F1B by default."""
        return str(self.get("SCHEDULE", "1F1B"))

    def _degree(self, axis: str) -> int:
        """Returns an entry of ``parallel``, which may be a number or a mapping with a ``size``."""
        value = (self.get("parallel") or {}).get(axis, 1)
        size = value.get("size", 1) if isinstance(value, Mapping) else value
        require_whole(f"parallel[{axis!r}]", size)
        return int(size)


def _run_file(path: Path) -> dict[str, Any]:
    try:
        names = runpy.run_path(str(path))
    except OSError as error:
        raise ConfigError(
            f"the configuration cannot be read from {path}",
            cause=str(error),
            fix="pass the path of a Python file that assigns NUM_MICRO_BATCHES, parallel, ..",
        ) from error
    return {name: value for name, value in names.items() if not name.startswith("__")}


def _refuse_misspelt(entries: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Refuses a name that is nearly one of ``names``; any other is the program's own."""
    for name in entries:
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=_NEAR)
        if near and name not in names:
            raise ConfigError(
                f"{where} has no entry {name!r}", fix=f"did you mean {near[0]!r}? else rename it"
            )


def _require_shape(shape: object) -> None:
    sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if not sizes or not all(map(is_whole_number, sizes)):
        raise ConfigError(
            "TENSOR_SHAPE is the shape of a micro-batch's values between stages",
            expected="whole numbers of at least 1, the rows of a micro-batch first",
            got=repr(shape),
            fix="write TENSOR_SHAPE=(16, 256, 8, 8), or leave it out: messages tell their shapes",
        )

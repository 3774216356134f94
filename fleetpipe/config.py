"""The options of a pipeline, read from a Fleet strategy and checked before any process waits.

Each field of :class:`PipelineConfig` that is an option of ``fleetpipe_configs`` has a function
``check(name, value)`` of this module, which returns the field's value for a user's value, or raises
ConfigError. ``_require_..`` checks alone; ``_read_..`` converts too.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from fleetpipe.aliases import Strategy
from fleetpipe.errors import ConfigError, ScheduleError, is_whole_number, nearest, require_whole
from fleetpipe.schedules import Costs, Edge, Schedule, build_verified, canonical_name, option_names
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS

DEFAULT_TIMEOUT = 600.0

#: The module with the class of a board's address, which is loaded only for jobs that have one. A
#: board is the page of the running job that rank 0 serves.
_ADDRESS_MODULE = "fleetpipe.contrib.view"

#: What must stand in a table of what is known to be right, or be let pass by the option ``allow``.
BORDERS = ("optimizer", "clip", "loss", "data", "state")

#: Options of ``fleetpipe_configs`` of earlier versions, and what to do without each.
_REMOVED = {"post_validation": "leave it out: ranks wait for the norm, and the bits are the same"}


def _checked_option(check: Callable[[str, Any], Any], default: object = None) -> Any:
    """Returns the dataclass field of an option of ``fleetpipe_configs``.

    Args:
        check: The function that checks and converts a user's value.
        default: The user's value if the option is left out, and the field's default.
    """
    return field(default=default, metadata={"check": check, "default": default})


def _require_positive(name: str, value: object, group: str = "fleetpipe_configs") -> int:
    """Returns an option that is a whole number of at least 1; ``group`` is the dict that has it."""
    return require_whole(name, value, fix=f"set strategy.{group} = {{{name!r}: ...}}")


def _option_error(name: str, rule: str, value: object, usual: object) -> ConfigError:
    """Returns the error of an option of ``fleetpipe_configs`` with a wrong value.

    Args:
        name: The option.
        rule: What is right, in words.
        value: The user's value.
        usual: A value to propose.
    """
    fix = f"set strategy.fleetpipe_configs = {{{name!r}: {usual!r}}}"
    return ConfigError(rule, got=repr(value), fix=fix)


def _require_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _option_error(name, f"{name} is True or False", value, True)
    return value


def _require_one_of(*words: str) -> Callable[[str, object], str]:
    """Returns the check of an option that is one of some words; errors propose the first one."""

    def check(name: str, value: object) -> str:
        """Returns the value if it is one of the words; else raises an error."""
        if isinstance(value, str) and value in words:
            return value
        *first_words, last = map(repr, words)
        nearby = [*difflib.get_close_matches(str(value), words, 1), words[0]][0]
        raise _option_error(name, f"{name} is {', '.join(first_words)} or {last}", value, nearby)

    return check


def _none_or(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Returns a check that returns None for None, and else the result of ``check``."""
    return lambda name, value: None if value is None else check(name, value)


def _read_slices(name: str, value: Any) -> int | tuple[int, ...]:
    """Reads a number of slices, or a list of numbers to which their lengths are proportional."""
    sizes = value if isinstance(value, (list, tuple)) else [value]
    if sizes and all(map(is_whole_number, sizes)):
        return tuple(map(int, sizes)) if isinstance(value, (list, tuple)) else int(value)
    raise ConfigError(
        "fleetpipe_configs['slices'] is a whole number of at least 1, or the lengths of slices",
        got=repr(value),
        fix="set strategy.fleetpipe_configs = {'slices': 4}, or {'slices': [300, 260, 240, 224]}",
    )


def _read_allow(name: str, value: object) -> tuple[str, ...]:
    """Reads the names to use although no table has them: texts such as ``"optimizer:MySAM"``."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    for entry in entries:
        border, colon, named = entry.partition(":") if isinstance(entry, str) else ("", "", "")
        if border not in BORDERS or not colon or not named.strip():
            raise ConfigError(
                f"fleetpipe_configs[{name!r}] is a list of texts BORDER:NAME",
                expected=f"one of {', '.join(BORDERS)}, a colon, and the name that the error gave",
                got=repr(entry),
                fix=nearest(border, BORDERS) if border else "allow = ['optimizer:MySAM'], say",
            )
    return tuple(entries)


def _read_guards(name: str, value: object) -> int:
    """Reads the number of steps between two checks of the training; 0 for none."""
    rule = "fleetpipe_configs['guards'] is a number of steps, or 0 for none"
    fix = "set strategy.fleetpipe_configs = {'guards': 100}"
    return require_whole(name, value, 0, rule=rule, fix=fix)


def _read_trace(name: str, value: object) -> str:
    """Reads the path of the folder for the trace of a run."""
    if not isinstance(value, (str, os.PathLike)):
        raise _option_error(name, "fleetpipe_configs['trace'] is a folder", value, "pipeline_trace")
    return os.fspath(value)


def _read_transport(name: str, value: object) -> str | None:
    """Reads how ranks send tensors, from the strategy or else ``FLEETPIPE_TRANSPORT``."""
    value = os.environ.get("FLEETPIPE_TRANSPORT") or None if value is None else value
    return None if value is None else _require_one_of(SOCKETS, PROCESS_GROUP)(name, value)


def _read_serve(name: str, value: object) -> str | None:
    """Reads the address of the job's board, from the strategy or else ``FLEETPIPE_SERVE``."""
    value = os.environ.get("FLEETPIPE_SERVE") if value is None else value
    if value in (None, ""):
        return None
    return str(importlib.import_module(_ADDRESS_MODULE).Address.parse(value))


def _read_costs(name: str, value: object) -> Costs | None:
    """Reads the costs of actions: ``Costs``, a mapping of its fields, or a path of a JSON file."""
    if value is None or isinstance(value, Costs):
        return value
    if isinstance(value, Mapping):
        return Costs.from_json(json.dumps(dict(value)))
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(
            "fleetpipe_configs['costs'] is a file or a mapping",
            got=repr(value),
            fix="set strategy.fleetpipe_configs = {'costs': 'costs.json'}, a file written with "
            "model.profile(data, path)",
        )
    return Costs.read(value)


def _read_timeout(name: str, value: Any) -> float:
    """Reads the limit of a wait for another rank, in seconds; None means the environment's."""
    if value is None:
        return _timeout_from_environment()
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        rule = "fleetpipe_configs['timeout'] must be a number of seconds above 0"
        raise _option_error(name, rule, value, 600)
    return float(value)


def _timeout_from_environment() -> float:
    """Reads ``FLEETPIPE_TIMEOUT``, in seconds; ``DEFAULT_TIMEOUT`` if it is not set."""
    text = os.environ.get("FLEETPIPE_TIMEOUT", str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise ConfigError(
            "FLEETPIPE_TIMEOUT must be a number of seconds above 0",
            where="the environment",
            got=repr(text),
            fix="set FLEETPIPE_TIMEOUT=600, or leave it out",
        )
    return seconds


@dataclass(frozen=True)
class PipelineConfig:
    """The options of a pipeline in a strategy: Fleet's own, then fleetpipe's.

    ``fleet.DistributedStrategy.fleetpipe_configs`` describes each of these.
    """

    #: ``accumulate_steps``, the number m of micro-batches of a batch.
    micro_batches: int = 1
    #: Rows of one micro-batch.
    micro_batch_size: int = 1
    #: Canonical name of the schedule.
    schedule: str = "1F1B"

    #: What may pass although no table has it, as ``BORDER:NAME`` with one of :data:`BORDERS`.
    allow: tuple[str, ...] = _checked_option(_read_allow, ())
    loss_reduction: str = _checked_option(_require_one_of("mean", "sum", "tokens"), "mean")
    #: Most that a rank may hold: forwards of a chunk, or bytes if ``costs`` has bytes.
    memory_cap: int | None = _checked_option(_none_or(_require_positive))
    fast_leaves: bool = _checked_option(_require_bool, True)
    compare_rows: bool = _checked_option(_require_bool, True)
    guards: int = _checked_option(_read_guards, 0)
    order: str = _checked_option(_require_one_of("fixed", "ready"), "fixed")
    overlap: bool = _checked_option(_require_bool, True)
    rehearse: str | None = _checked_option(_none_or(_require_one_of("bfloat16", "float16")))
    rng: str = _checked_option(_require_one_of("keyed", "fleet"), "keyed")
    sums: str = _checked_option(_require_one_of("running", "tree"), "running")
    #: The address of the job's board: a port, or HOST:PORT.
    serve: str | None = _checked_option(_read_serve)
    timeout: float = field(
        default=DEFAULT_TIMEOUT, metadata={"check": _read_timeout, "default": None}
    )
    trace: str | None = _checked_option(_none_or(_read_trace))
    #: The way of tensors between ranks. None: process groups on GPUs, else sockets.
    transport: str | None = _checked_option(_read_transport)
    fetch: str = _checked_option(_require_one_of("mean", "last", "all"), "mean")
    fetch_broadcast: bool = _checked_option(_require_bool, False)
    #: The costs of actions. With the bytes of each stage ``memory_cap`` is in bytes.
    costs: Costs | None = field(default=None, metadata={"check": _read_costs, "default": None})
    #: The number of slices of each sequence, or numbers to which their lengths are proportional.
    slices: int | tuple[int, ...] | None = _checked_option(_none_or(_read_slices))
    #: Options of the schedule (not of this class), sorted: pairs of a name and a value.
    options: tuple[tuple[str, object], ...] = ()

    @classmethod
    def from_strategy(cls, strategy: Strategy) -> PipelineConfig:
        """Reads ``pipeline_configs`` and ``fleetpipe_configs`` of ``strategy``.

        Args:
            strategy: fleetpipe's or Paddle's own ``DistributedStrategy``; None for the defaults.

        Raises:
            ConfigError: An option has a value that cannot be used.
        """
        stock = strategy.pipeline_configs if strategy is not None else {}
        micro_batches, micro_batch_size = (
            _require_positive(name, stock.get(name, 1), "pipeline_configs")
            for name in ("accumulate_steps", "micro_batch_size")
        )
        schedule = _canonical_schedule(stock.get("schedule_mode", "1F1B"), strategy)
        options = dict(getattr(strategy, "fleetpipe_configs", FLEETPIPE_DEFAULTS))
        if options["trace"] is None and _is_switched_on(strategy, "profiling"):
            options["trace"] = "pipeline_trace"
        values = {
            option.name: option.metadata["check"](option.name, options[option.name])
            for option in _OPTIONS
        }
        values["options"] = _options_of_schedule(options)
        return cls(micro_batches, micro_batch_size, schedule, **values)

    @property
    def slice_count(self) -> int | None:
        """The number of slices of each sequence; None if the option is not set."""
        return len(self.slices) if isinstance(self.slices, tuple) else self.slices

    def resized(self, micro_batches: int, micro_batch_size: int) -> PipelineConfig:
        """Returns these options with other micro-batches.

        Args:
            micro_batches: Micro-batches of a batch, m.
            micro_batch_size: Rows of one micro-batch.

        Raises:
            ConfigError: One is no whole number of at least 1.
        """
        check = functools.partial(_require_positive, group="pipeline_configs")
        micro_batches = check("accumulate_steps", micro_batches)
        rows = check("micro_batch_size", micro_batch_size)
        return replace(self, micro_batches=micro_batches, micro_batch_size=rows)

    def schedule_for(
        self,
        ranks: int,
        chunks: int | None,
        edges: Iterable[Edge] | None = None,
        head: bool = False,
    ) -> Schedule:
        """Builds the schedule that these options ask for, verified against the memory cap.

        Args:
            ranks: Ranks of the pipeline, p.
            chunks: Model parts of each rank, v; None for the schedule's own default.
            edges: The edges of the model; None for a chain of stages.
            head: Whether the model has a vocabulary head.

        Raises:
            ConfigError: The schedule does not take that number of chunks or micro-batches.
            ScheduleError: It needs more memory than the cap allows, or cannot run on these edges.
        """
        checked = None if edges is None else tuple(edges)
        return _build_schedule(self, ranks, chunks, checked, head)


_OPTIONS = tuple(option for option in fields(PipelineConfig) if option.metadata)

FLEETPIPE_DEFAULTS: Mapping[str, object] = {
    **{option.name: option.metadata["default"] for option in _OPTIONS},
    **dict.fromkeys(("groups", "warmup_slack")),
}


def scale_strategy(strategy: Strategy) -> str:
    """Returns how ``gradient_scale_configs`` combines the replicas' gradients: "avg" or "sum".

    Raises:
        ConfigError: It asks for neither the mean nor the sum.
    """
    scale = str(strategy.gradient_scale_configs["scale_strategy"])
    if scale not in ("avg", "sum"):
        raise ConfigError(
            "gradient_scale_configs['scale_strategy'] is 'avg' or 'sum' here",
            got=repr(scale),
            fix="scale the loss itself for anything else",
        )
    return scale


@functools.lru_cache(maxsize=4)
def _build_schedule(
    config: PipelineConfig,
    ranks: int,
    chunks: int | None,
    edges: tuple[Edge, ...] | None,
    head: bool,
) -> Schedule:
    """Builds the schedule of :meth:`PipelineConfig.schedule_for`; the last ones are cached."""
    try:
        return build_verified(
            config.schedule,
            ranks=ranks,
            micro_batches=config.micro_batches,
            chunks=chunks,
            options={**dict(config.options), "slices": config.slice_count},
            memory_cap=config.memory_cap,
            costs=config.costs,
            edges=edges,
            head=head,
        )
    except ScheduleError:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"schedule_mode={config.schedule!r} cannot be built for this model and batch",
            got=f"pp_degree={ranks}, num_virtual_pipeline_stages={chunks}, "
            f"accumulate_steps={config.micro_batches}",
            cause="\n    ".join(str(error).splitlines()),
            fix="leave num_virtual_pipeline_stages out for the schedule's own number of chunks, "
            "or choose another schedule",
        ) from error


def merge_fleetpipe_configs(
    current: Mapping[str, object], changes: Mapping[str, object]
) -> dict[str, object]:
    """Returns the options ``current`` of ``fleetpipe_configs``, updated by ``changes``.

    Raises:
        ConfigError: A key of ``changes`` is no option; the message names the nearest ones.
    """
    names = {*FLEETPIPE_DEFAULTS, *option_names()}
    for key in changes:
        if key not in names:
            fix = _REMOVED.get(key) or nearest(key, sorted(names))
            raise ConfigError(f"fleetpipe_configs has no option {key!r}", fix=fix)
    return {**current, **changes}


def _canonical_schedule(name: str, strategy: Strategy) -> str:
    """Returns the canonical name of the schedule of a strategy.

    Args:
        name: The strategy's ``schedule_mode``.
        strategy: The strategy, whose switch ``use_dualpipev`` means DualPipeV.

    Raises:
        ConfigError: There is no such schedule, or the switch contradicts it.
    """
    schedule = canonical_name(name)
    if not _is_switched_on(strategy, "use_dualpipev"):
        return schedule
    if schedule not in (PipelineConfig.schedule, "DualPipeV"):
        raise ConfigError(
            "pp_configs.use_dualpipev means the schedule DualPipeV",
            got=f"schedule_mode={name!r}",
            fix="leave use_dualpipev out, and choose with schedule_mode",
        )
    return "DualPipeV"


def _is_switched_on(strategy: Strategy, name: str) -> bool:
    """Returns whether a switch of Fleet's ``pp_configs`` is on; False without a strategy."""
    return bool(strategy and getattr(strategy.hybrid_configs["pp_configs"], name, False))


def _options_of_schedule(options: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Returns the value of ``PipelineConfig.options``.

    Args:
        options: All of ``fleetpipe_configs``. Those that are fields of :class:`PipelineConfig`, and
            those that are None, are left out; lists become tuples.
    """
    groups = options["groups"]
    if groups is not None and not isinstance(groups, (list, tuple)):
        raise ConfigError("`groups` is no list of sizes", got=repr(groups), fix="groups=[4, 4]")
    field_names = {option.name for option in _OPTIONS}
    # Schedules have an option "slices" too.
    if taken := (field_names & option_names()) - {"slices"}:
        raise ConfigError(
            "a registered schedule has options that `fleetpipe_configs` has for something else",
            got=", ".join(sorted(taken)),
            fix="give these parameters of its function other names",
        )
    values = [(name, options.get(name)) for name in sorted(option_names() - field_names)]
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in values
        if value is not None
    )

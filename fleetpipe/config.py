"""The options of a pipeline, read from a Fleet strategy and checked before any process waits."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from fleetpipe.aliases import Strategy
from fleetpipe.errors import ConfigError, ScheduleError, nearest
from fleetpipe.schedules import Costs, Edge, Schedule, build_verified, canonical_name, option_names
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS
from fleetpipe.watch.address import SERVE, Address

DEFAULT_TIMEOUT = 600.0

#: How a batch's loss is made of those of its micro-batches.
LOSS_REDUCTIONS = ("mean", "sum", "tokens")

FLEETPIPE_DEFAULTS: Mapping[str, object] = {
    "fast_leaves": True,
    "fetch": "mean",
    "fetch_broadcast": False,
    "compare_rows": True,
    "costs": None,
    "groups": None,
    "guards": 0,
    "slices": None,
    "loss_reduction": "mean",
    "memory_cap": None,
    "overlap": True,
    "post_validation": False,
    "rehearse": None,
    "rng": "keyed",
    "serve": None,
    "timeout": None,
    "trace": None,
    "transport": None,
    "warmup_slack": None,
}


@dataclass(frozen=True)
class PipelineConfig:
    """What a strategy asks of a pipeline.

    Attributes:
        micro_batches: ``accumulate_steps``, the number m of micro-batches of a batch.
        micro_batch_size: Rows of one micro-batch.
        schedule: Canonical name of the schedule.
        loss_reduction: ``"mean"`` or ``"sum"`` over the micro-batches of a batch, or over its
            ``"tokens"``: a mean over all places that the loss counts.
        memory_cap: Most forwards whose activations a rank may hold, in chunk units; bytes where
            ``costs`` has the bytes of each stage; None: no cap.
        post_validation: Dynamic graph: whether a rank may step before the norm of all gradients is
            known; it takes back what was clipped.
        fast_leaves: Dynamic graph: whether layers may compute the same bits in less time.
        compare_rows: Dynamic graph: whether the ranks of a pipeline compare the rows of each batch.
        guards: Dynamic graph: after how many steps invariants are verified again; 0: never.
        overlap: Dynamic graph: whether the exchanges of a fused forward and backward travel while
            the other one computes.
        rehearse: Dynamic graph: ``"bfloat16"`` or ``"float16"``, in which a CPU computes what
            ``paddle.amp`` has in it on a GPU; None: all is as Paddle has it on that device.
        rng: What random operations of layers draw from: ``"keyed"``, a stream of each layer and
            micro-batch, or ``"fleet"``, Paddle's generator as it is.
        serve: Where the first rank serves the job's board; None: nowhere.
        timeout: Seconds that any wait for another rank may last.
        fetch: Static graph: ``"mean"``, ``"last"`` or ``"all"`` of a value of the micro-batches.
        fetch_broadcast: Static graph: whether every rank gets what is fetched.
        trace: Folder for the trace of what really ran; None: nothing is recorded.
        transport: What tensors between ranks go over: ``"sockets"`` or Paddle's
            ``"process_group"``; None: process groups where the ranks have devices.
        costs: What actions cost, for the schedule ``auto`` and for a memory cap in bytes.
        options: Further options of the schedule, as ``groups`` and ``warmup_slack``, and those of
            registered schedules: pairs of a name and a value.
        slices: Slices that each sequence is cut into, for Seq1F1B; their lengths, in proportion,
            where these are not equal; the most slices, for auto.
    """

    micro_batches: int = 1
    micro_batch_size: int = 1
    schedule: str = "1F1B"
    loss_reduction: str = "mean"
    memory_cap: int | None = None
    post_validation: bool = False
    fast_leaves: bool = True
    compare_rows: bool = True
    guards: int = 0
    overlap: bool = True
    rehearse: str | None = None
    rng: str = "keyed"
    serve: Address | None = None
    timeout: float = DEFAULT_TIMEOUT
    trace: str | None = None
    transport: str | None = None
    fetch: str = "mean"
    fetch_broadcast: bool = False
    costs: Costs | None = None
    options: tuple[tuple[str, object], ...] = ()
    slices: int | tuple[int, ...] | None = None

    @classmethod
    def from_strategy(cls, strategy: Strategy) -> PipelineConfig:
        """Reads ``pipeline_configs`` and ``fleetpipe_configs`` of ``strategy``.

        Args:
            strategy: fleetpipe's or Paddle's own ``DistributedStrategy``; None for the defaults.

        Raises:
            ConfigError: An option has a value that cannot be used.
        """
        stock = strategy.pipeline_configs if strategy is not None else {}
        options: Mapping[str, Any] = getattr(strategy, "fleetpipe_configs", FLEETPIPE_DEFAULTS)
        cap, half = options["memory_cap"], options["rehearse"]
        return cls(
            micro_batches=_positive("accumulate_steps", stock.get("accumulate_steps", 1)),
            micro_batch_size=_positive("micro_batch_size", stock.get("micro_batch_size", 1)),
            schedule=_schedule(stock.get("schedule_mode", "1F1B"), strategy),
            loss_reduction=_choice("loss_reduction", options["loss_reduction"], LOSS_REDUCTIONS),
            memory_cap=None if cap is None else _positive("memory_cap", cap),
            post_validation=_switch("post_validation", options["post_validation"]),
            fast_leaves=_switch("fast_leaves", options["fast_leaves"]),
            compare_rows=_switch("compare_rows", options["compare_rows"]),
            guards=_guards(options["guards"]),
            overlap=_switch("overlap", options["overlap"]),
            rehearse=None if half is None else _choice("rehearse", half, ("bfloat16", "float16")),
            rng=_choice("rng", options["rng"], ("keyed", "fleet")),
            serve=_serve(options["serve"]),
            timeout=_timeout(options["timeout"]),
            fetch=_choice("fetch", options["fetch"], ("mean", "last", "all")),
            fetch_broadcast=_switch("fetch_broadcast", options["fetch_broadcast"]),
            trace=_trace(options["trace"], strategy),
            transport=_transport(options["transport"]),
            costs=_costs(options["costs"]),
            options=_of_schedule(options),
            slices=_slices(options["slices"]),
        )

    @property
    def most_slices(self) -> int:
        """Most slices that are asked for; 1 where none are."""
        return len(self.slices) if isinstance(self.slices, tuple) else self.slices or 1

    def resized(self, micro_batches: int, micro_batch_size: int) -> PipelineConfig:
        """Returns these options with another number and size of micro-batches.

        Raises:
            ConfigError: One is no whole number of at least 1.
        """
        return replace(
            self,
            micro_batches=_positive("accumulate_steps", micro_batches),
            micro_batch_size=_positive("micro_batch_size", micro_batch_size),
        )

    def schedule_for(
        self,
        ranks: int,
        chunks: int | None,
        edges: Iterable[Edge] | None = None,
        placed: str | None = None,
        head: bool = False,
    ) -> Schedule:
        """Builds the schedule that these options ask for, verified against the memory cap.

        Args:
            ranks: Ranks of the pipeline, p.
            chunks: Model parts of each rank, v; None for the schedule's own default.
            edges: The edges of the model; None for a chain of stages.
            placed: The placement of a model that stands, which ``auto`` keeps.
            head: Whether the model has a vocabulary head.

        Raises:
            ConfigError: The schedule does not take that number of chunks or micro-batches.
            ScheduleError: It needs more memory than the cap allows, or cannot run on these edges.
        """
        checked = None if edges is None else tuple(edges)
        return _schedule_for(self, ranks, chunks, checked, placed, head)


def scale_strategy(strategy: Strategy) -> str:
    """Returns what ``gradient_scale_configs`` makes of the replicas' gradients: "avg" or "sum".

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
def _schedule_for(
    config: PipelineConfig,
    ranks: int,
    chunks: int | None,
    edges: tuple[Edge, ...] | None,
    placed: str | None,
    head: bool,
) -> Schedule:
    costs = config.costs
    if isinstance(config.slices, tuple) and (costs is None or costs.each_slice is None):
        # A search is to know of the lengths. Costs for a schedule by name are those of a slice.
        costs = (costs or Costs()).parted(config.slices) if config.schedule == "auto" else costs
    try:
        return build_verified(
            config.schedule,
            ranks=ranks,
            micro_batches=config.micro_batches,
            chunks=chunks,
            options={
                **dict(config.options),
                "slices": None if config.slices is None else config.most_slices,
            },
            memory_cap=config.memory_cap,
            costs=costs,
            edges=edges,
            placed=placed,
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
    """Returns ``current`` with ``changes`` put in; an unknown key is refused with the nearest."""
    names = {*FLEETPIPE_DEFAULTS, *option_names()} - {"placed"}
    for key in changes:
        if key not in names:
            raise ConfigError(
                f"fleetpipe_configs has no option {key!r}", fix=nearest(key, sorted(names))
            )
    return {**current, **changes}


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name} must be a whole number of at least 1",
            got=f"{value!r}",
            fix=f"set strategy.pipeline_configs = {{{name!r}: ...}}",
        )
    return value


def _refused(name: str, rule: str, value: object, usual: object) -> ConfigError:
    """Returns the error about an option of ours, with a value that it may have."""
    fix = f"set strategy.fleetpipe_configs = {{{name!r}: {usual!r}}}"
    return ConfigError(rule, got=repr(value), fix=fix)


def _schedule(name: str, strategy: Strategy) -> str:
    """Returns the schedule's canonical name; Fleet's switch for DualPipeV takes 1F1B's place."""
    schedule = canonical_name(name)
    if not _switched_on(strategy, "use_dualpipev"):
        return schedule
    if schedule not in (PipelineConfig.schedule, "DualPipeV"):
        raise ConfigError(
            "pp_configs.use_dualpipev means the schedule DualPipeV",
            got=f"schedule_mode={name!r}",
            fix="leave use_dualpipev out, and choose with schedule_mode",
        )
    return "DualPipeV"


def _switched_on(strategy: Strategy, name: str) -> bool:
    """Whether a switch of Fleet's ``pp_configs`` is on."""
    return bool(strategy and getattr(strategy.hybrid_configs["pp_configs"], name, False))


def _choice(name: str, value: object, words: tuple[str, ...]) -> str:
    """Returns the value of an option that is one of a few words, the usual one first."""
    if isinstance(value, str) and value in words:
        return value
    *first_words, last = map(repr, words)
    raise _refused(name, f"{name} is {', '.join(first_words)} or {last}", value, words[0])


def _of_schedule(options: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Returns what belongs to the schedule alone, with tuples for lists."""
    groups = options["groups"]
    if groups is not None and not isinstance(groups, (list, tuple)):
        raise ConfigError("`groups` is no list of sizes", got=repr(groups), fix="groups=[4, 4]")
    names = option_names() - {"costs", "memory_cap", "slices"}
    values = {name: options[name] for name in sorted(names & options.keys())}
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in values.items()
        if value is not None
    )


def _slices(value: Any) -> int | tuple[int, ...] | None:
    """Returns the number of slices, or their lengths in proportion."""
    sizes = value if isinstance(value, (list, tuple)) else [value]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
    if value is None or (whole and sizes):
        return tuple(value) if isinstance(value, (list, tuple)) else value
    raise ConfigError(
        "fleetpipe_configs['slices'] is a whole number of at least 1, or the lengths of slices",
        got=repr(value),
        fix="set strategy.fleetpipe_configs = {'slices': 4}, or {'slices': [300, 260, 240, 224]}",
    )


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, f"{name} is True or False", value, True)
    return value


def _guards(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    rule = "fleetpipe_configs['guards'] is a number of steps, or 0 for none"
    raise _refused("guards", rule, value, 100)


def _trace(value: object, strategy: Strategy) -> str | None:
    """Returns the folder for the trace; Fleet's switch for profiling gives it a usual name."""
    if value is None:
        return "pipeline_trace" if _switched_on(strategy, "profiling") else None
    if not isinstance(value, (str, os.PathLike)):
        raise _refused("trace", "fleetpipe_configs['trace'] is a folder", value, "pipeline_trace")
    return os.fspath(value)


def _transport(value: object) -> str | None:
    """Returns what tensors between ranks go over, if the strategy or the environment says it."""
    value = os.environ.get("FLEETPIPE_TRANSPORT") or None if value is None else value
    return None if value is None else _choice("transport", value, (SOCKETS, PROCESS_GROUP))


def _serve(value: object) -> Address | None:
    """Returns where the first rank serves; a command may say so where the script does not."""
    value = os.environ.get(SERVE) if value is None else value
    return None if value in (None, "") else Address.parse(value)


def _costs(value: object) -> Costs | None:
    """Reads costs given as a value, as a mapping, or as the path of a JSON file."""
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


def _timeout(value: Any) -> float:
    if value is None:
        return _timeout_of_environment()
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        rule = "fleetpipe_configs['timeout'] must be a number of seconds above 0"
        raise _refused("timeout", rule, value, 600)
    return float(value)


def _timeout_of_environment() -> float:
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

"""``context``: MindSpore's options for pipelines, and the job that they describe.

``set_auto_parallel_context`` checks and keeps options. The job begins with ``init()``, or when the
stage of this process is first needed. MindSpore's programs may call ``init()`` before they set the
stages; then the job begins when an option makes it parallel.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fleetpipe import fleet
from fleetpipe.aliases import Strategy
from fleetpipe.errors import ConfigError, StateError, UsageError, nearest, require_whole
from fleetpipe.job import meeting
from fleetpipe.job.job import Job, current_job
from fleetpipe.schedules import canonical_name

#: MindSpore's modes of execution.
GRAPH_MODE, PYNATIVE_MODE = 0, 1
#: Options of ``set_context`` without effect: Paddle chooses the device, and how it runs.
_WITHOUT_EFFECT = ("mode", "device_target", "device_id", "max_call_depth", "max_device_memory")

#: Fleetpipe's names of MindSpore's schedules; other names are fleetpipe's own.
SCHEDULERS = {"1f1b": "1F1B", "gpipe": "FThenB", "zero_bubble_v": "ZBV"}

#: Whether ``init()`` was called and waits for an option that makes the job parallel.
_initialized = False


class ParallelMode(str, enum.Enum):
    """How a job is made parallel; stages need ``SEMI_AUTO_PARALLEL``."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


def require_number(
    name: str, value: object, least: int, rule: str, fix: str, where: str | None = None
) -> int:
    """Returns a value that must be an int of at least ``least``.

    Args:
        name: The name of the value, for error messages, like the arguments from ``rule`` on.
        value: The value.
        least: The least number that is allowed.
        rule: What the value must be.
        fix: What the user should write.
        where: What the value belongs to.

    Raises:
        UsageError: The value is no int. The error is a TypeError, like MindSpore's.
        ConfigError: The value is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        got = f"{value!r} of type {type(value).__name__}"
        raise UsageError(rule, where=where, got=got, fix=fix)
    return require_whole(name, value, least, rule=rule, where=where, fix=fix)


@dataclass(frozen=True)
class Options:
    """The options that ``set_auto_parallel_context`` has set.

    Attributes:
        pipeline_stages: Ranks of a pipeline.
        parallel_mode: The mode; several stages need ``SEMI_AUTO_PARALLEL``.
        gradients_mean: Whether gradients of replicas are averaged; else they are added up.
        full_batch: Accepted without effect: each replica reads what its loader gives it.
        pipeline_config: ``{"pipeline_scheduler": name}``.
        save_graphs: Whether each rank writes its stages and its schedule into files.
        save_graphs_path: The folder of these files.
    """

    pipeline_stages: int = 1
    parallel_mode: str = ParallelMode.STAND_ALONE
    gradients_mean: bool = False
    full_batch: bool = False
    pipeline_config: Mapping[str, object] | None = None
    save_graphs: bool = False
    save_graphs_path: str = "."

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UsageError: ``pipeline_stages`` is no int.
            ConfigError: A value cannot be used.
        """
        rule = "pipeline_stages is the number of ranks of a pipeline, at least 1"
        fix = "set_auto_parallel_context(pipeline_stages=2)"
        require_number("pipeline_stages", self.pipeline_stages, 1, rule, fix)
        modes = [mode.value for mode in ParallelMode]
        if self.parallel_mode not in modes:
            raise ConfigError(
                f"there is no parallel_mode {self.parallel_mode!r}",
                fix=nearest(str(self.parallel_mode), modes),
            )
        unknown = [key for key in self.pipeline_config or {} if key != "pipeline_scheduler"]
        if unknown:
            raise ConfigError(
                f"pipeline_config has no entry {unknown[0]!r} here",
                fix="leave it out: chunks follow from the schedule; "
                "pipeline_config={'pipeline_scheduler': '1f1b'}",
            )

    @property
    def parallel(self) -> bool:
        """Whether the mode makes the job parallel, and the stages that it needs are set."""
        if self.parallel_mode == ParallelMode.SEMI_AUTO_PARALLEL:
            return self.pipeline_stages > 1
        return self.parallel_mode != ParallelMode.STAND_ALONE

    @property
    def schedule(self) -> str:
        """The schedule that ``pipeline_scheduler`` names; a ConfigError if there is none."""
        name = str((self.pipeline_config or {}).get("pipeline_scheduler", "1f1b"))
        return canonical_name(SCHEDULERS.get(name, name))

    def strategy(self, micro_batches: int = 1, rows: int = 1) -> Strategy:
        """Returns these options as a strategy of Fleet's.

        Args:
            micro_batches: The number of micro-batches of a batch.
            rows: Rows of each micro-batch.

        Raises:
            ConfigError: There are several stages, and the mode is not ``SEMI_AUTO_PARALLEL``.
        """
        if self.pipeline_stages > 1 and self.parallel_mode != ParallelMode.SEMI_AUTO_PARALLEL:
            raise ConfigError(
                "stages need parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL",
                got=f"pipeline_stages={self.pipeline_stages}, parallel_mode="
                f"{ParallelMode(self.parallel_mode).name}",
                fix="context.set_auto_parallel_context(parallel_mode="
                "ParallelMode.SEMI_AUTO_PARALLEL)",
            )
        strategy = fleet.DistributedStrategy()
        # Stage s is on the ranks s * n to s * n + n - 1, with n = world size / stages.
        strategy.hybrid_configs = {
            "dp_degree": -1,
            "pp_degree": self.pipeline_stages,
            "order": ["pp", "dp", "sharding", "sep", "mp"],
        }
        strategy.pipeline_configs = {
            "accumulate_steps": micro_batches,
            "micro_batch_size": rows,
            "schedule_mode": self.schedule,
        }
        strategy.fleetpipe_configs = {"loss_reduction": "sum"}
        scale = "avg" if self.gradients_mean else "sum"
        strategy.gradient_scale_configs = {"scale_strategy": scale}
        return strategy


#: The names of all options.
OPTIONS = [field.name for field in fields(Options)]
_options = Options()


def set_auto_parallel_context(**options: Any) -> None:
    """Sets the given options; others are unchanged.

    Args:
        options: Attributes of :class:`Options`, by name.

    Raises:
        ConfigError: There is no such option, or it has a value that cannot be used.
        UsageError: ``pipeline_stages`` is no int.
        StateError: ``pipeline_stages`` changes while a job runs.
        PipelineTimeout: The call begins the job of an earlier ``init()``, and some rank did not
            arrive.
    """
    global _options
    _require_names("set_auto_parallel_context", options, OPTIONS)
    changed = replace(_options, **options)
    if current_job() is not None and changed.pipeline_stages != _options.pipeline_stages:
        raise StateError(
            "the number of stages cannot change while a job runs",
            got=f"pipeline_stages={changed.pipeline_stages}, the job has "
            f"{_options.pipeline_stages}",
            fix="set it before init(), or call fleet.shutdown() first",
        )
    _options = changed
    if _initialized and changed.parallel:
        job()


def set_context(**options: Any) -> None:
    """Sets ``save_graphs`` and ``save_graphs_path``, as :func:`set_auto_parallel_context` does.

    Args:
        options: By name; ``mode``, ``device_target``, ``device_id``, ``max_call_depth`` and
            ``max_device_memory`` are accepted without effect.

    Raises:
        ConfigError: There is no such option.
    """
    names = (*_WITHOUT_EFFECT, "save_graphs", "save_graphs_path")
    _require_names("set_context", options, names)
    set_auto_parallel_context(**{n: options[n] for n in options if n not in _WITHOUT_EFFECT})


def get_auto_parallel_context(name: str) -> Any:
    """Returns an option.

    Raises:
        ConfigError: There is no option of that name.
    """
    _require_names("get_auto_parallel_context", [name], OPTIONS)
    return getattr(_options, name)


def reset_auto_parallel_context() -> None:
    """Sets all options to their defaults."""
    global _options, _initialized
    _options, _initialized = Options(), False


def options() -> Options:
    """Returns the current options."""
    return _options


def init(backend_name: str | None = None) -> None:
    """Begins the job of ``pipeline_stages``. Collective over all processes of the launcher.

    If no option makes the job parallel yet, the job begins when an option does. Functions that need
    a job begin it themselves; call this if the data is sharded before that.

    Args:
        backend_name: Accepted without effect.

    Raises:
        ConfigError: The stages do not divide the number of processes, or the mode has no stages.
        PipelineTimeout: Some rank did not arrive within the limit.
    """
    global _initialized
    alone = _options.parallel_mode == ParallelMode.STAND_ALONE and _options.pipeline_stages == 1
    _initialized = alone and current_job() is None
    if not _initialized:
        job()


def job() -> Job:
    """Returns the job of the options; begins it if none runs, which is collective.

    Raises:
        ConfigError: The options do not fit the processes, or the job that runs.
        PipelineTimeout: Some rank did not arrive within the limit.
    """
    global _initialized
    stages, processes = _options.pipeline_stages, meeting.world_size()
    if processes > 1 and processes % stages:
        raise ConfigError(
            f"pipeline_stages (={stages}) does not divide the {processes} processes",
            fix=f"launch a multiple of {stages} processes",
        )
    _initialized = False
    if current_job() is None:
        fleet.init(is_collective=True, strategy=_options.strategy())
    running = current_job()
    if running is None or running.degrees.pp != stages:
        raise ConfigError(
            "the job that runs has another number of stages",
            expected=f"pipeline_stages={stages}",
            got="none" if running is None else f"pp_degree={running.degrees.pp}",
            fix="call fleet.shutdown() first, or set pipeline_stages before fleet.init",
        )
    return running


def get_rank() -> int:
    """Returns this process's rank in the job."""
    return meeting.own_rank()


def get_group_size() -> int:
    """Returns the number of processes."""
    return meeting.world_size()


def _require_names(function: str, names: Iterable[str], options: Sequence[str]) -> None:
    """Raises ConfigError if a name is none of the options of a function."""
    for name in names:
        if name not in options:
            raise ConfigError(f"{function} has no option {name!r}", fix=nearest(name, options))

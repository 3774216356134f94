"""Defines ``fleet.init`` and ``fleet.shutdown``: check options, connect the ranks, end the job.

At its exit a process ends its job, too, and logs what to do about some errors of stock Paddle.
"""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
import itertools
import multiprocessing
import os
import sys
import warnings
from typing import Any

from fleetpipe import log
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.dygraph import tensor_parallel
from fleetpipe.dygraph.random_keys import GeneratorStates
from fleetpipe.errors import ConfigError, FleetPipeError, NotInitialized, StateError
from fleetpipe.extras import extra
from fleetpipe.fleet.static_graph import load_at_first_device_guard, static_graph
from fleetpipe.fleet.strategy import DistributedStrategy
from fleetpipe.job import attempt_files, fleet_view, job, meeting, watch
from fleetpipe.job.allow import Allow
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.axes import Degrees, Mesh, complete_order
from fleetpipe.mesh.degree_checks import sharding_stage
from fleetpipe.paddle_api import distributed, paddle, paddle_fleet
from fleetpipe.paddle_api.amp import rehearsal_dtype
from fleetpipe.paddle_api.device import device_kind, dynamic_mode
from fleetpipe.paddle_types import DistributedStrategy as Strategy
from fleetpipe.paddle_types import Fleet, HybridCommunicateGroup, RoleMakerBase

_log = log.logger(__name__)

#: Variables in which torchrun, Open MPI and MPICH have the number of processes they started.
_OTHER_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

#: Paddle's singleton, of which Fleet's functions are methods.
_fleet: Fleet = paddle_fleet.fleet
#: Numbers the jobs of this process.
_job_numbers = itertools.count()
#: The role maker, is_collective and log level of ``init`` in static mode; None outside of it.
_static_arguments: tuple[Any, bool, int | str] | None = None

#: The error of stock Paddle's ``PipelineLayer`` without a GPU; it names no cause.
_STOCK_ON_CPU = "'ParallelEnv' object has no attribute '_device_id'"
_STOCK_HINT = """\
the PipelineLayer of this script is stock Paddle's, which cannot be built on a CPU
  what to do: from fleetpipe.fleet.meta_parallel import PipelineLayer; where a library imports it, \
start the script with fleetpipe run, or with import fleetpipe; fleetpipe.install()"""

#: The begin of the error of stock Paddle's ``fleet.init`` in one process.
_STOCK_ALONE = "nranks: 1, mp_num:"
_STOCK_ALONE_HINT = """\
the fleet.init of this script is stock Paddle's, which plays no pipeline in one process
  what to do: from fleetpipe import fleet, for fleet.init and all else; where a library calls it, \
start the script with fleetpipe run, or with import fleetpipe; fleetpipe.install()"""


def init(
    role_maker: RoleMakerBase | None = None,
    is_collective: bool = False,
    strategy: Strategy | None = None,
    log_level: int | str = "INFO",
) -> Fleet:
    """Begins a job: Fleet's ``init``, with every option checked before any process waits.

    Collective over all ranks of the job: those of a launcher, or the tasks that ``srun`` started. A
    process that is not one of several and asks for ``pp_degree`` above 1 plays all ranks itself.
    Called again with the same degrees it only changes the strategy; other degrees need
    :func:`shutdown` first.

    Args:
        role_maker: As in Fleet.
        is_collective: As in Fleet; pipelines need True.
        strategy: fleetpipe's or Paddle's ``DistributedStrategy``; None for the defaults.
        log_level: As in Fleet.

    Returns:
        Paddle's ``Fleet`` object.

    Raises:
        ConfigError: The degrees do not fit the number of processes, an option is wrong, or another
            framework's launcher started the processes.
        PipelineTimeout: A rank did not arrive within the limit.
        StateError: This process was started by ``multiprocessing``, and imports the script.
    """
    _refuse_second_reading()
    strategy = DistributedStrategy() if strategy is None else strategy
    config = PipelineConfig.from_strategy(strategy)
    if "SLURM_JOB_ID" in os.environ:
        extra("slurm").adopt()
    world_size = meeting.world_size()
    distributed.choose_backend()
    _refuse_other_launchers()
    degrees = Degrees.resolve(strategy.hybrid_configs, world_size, attempt_files.whole_size())
    if degrees.pp > 1 and not is_collective:
        raise ConfigError(
            "a pipeline runs in collective mode",
            got=f"fleet.init(is_collective={is_collective}) with pp_degree={degrees.pp}",
            fix="fleet.init(is_collective=True, strategy=strategy)",
        )
    if config.rehearse is not None and device_kind() == "cpu":
        _rehearsal_module().require_rounding(config.rehearse)
    arguments = (role_maker, is_collective, strategy, log_level)
    dynamic = paddle.in_dynamic_mode()
    if config.sums == "tree":
        degrees.require_tree(dynamic, device_kind())
    if dynamic and degrees.pp > 1:
        scale_strategy(strategy)
    shards = dynamic and is_collective and degrees.state_shards > 1
    stage = sharding_stage(strategy) if shards else 1
    load_at_first_device_guard()
    if not dynamic:
        static_graph().install()
        return _init_static(degrees, arguments)
    if not is_collective:
        return _fleet.init(*arguments)
    if strategy.amp and device_kind() == "cpu" and config.rehearse is None:
        log.once(
            _log.warning, "strategy.amp has no effect on CPU: Paddle computes in float32 there"
        )
    running = current_job()
    if running is not None:
        return _change_strategy(running, degrees, strategy, config, stage)
    return _begin_job(degrees, world_size, arguments, config, stage)


def _refuse_second_reading() -> None:
    """Refuses to begin a job while a process of ``multiprocessing`` imports the main script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise StateError(
            "a process that multiprocessing started runs the script from its top, and begins a job",
            cause='its start method is "spawn" or "forkserver": such a process imports the script',
            fix="put what the script does, but no function or class, below `if __name__ == "
            '"__main__":`',
        )


def begin_static(strategy: Any, degrees: Degrees, config: PipelineConfig) -> Job:
    """Begins the job of a static program, whose ``device_guard`` s set ``pp_degree``. Collective.

    ``minimize`` calls it, when it knows the program's stages.

    Args:
        strategy: The strategy of the program's optimizer.
        degrees: The degrees.
        config: The options of ``strategy``.

    Returns:
        The running job if it has these degrees, else a new one.

    Raises:
        ConfigError: ``fleet.init`` was not called, or a job with other degrees is running.
        PipelineTimeout: A rank did not arrive within the limit.
        StateError: The job was shut down while it began.
    """
    if _static_arguments is None:
        raise ConfigError(
            "the optimizer of a static pipeline is minimized after fleet.init",
            fix="fleet.init(is_collective=True) in static mode, before minimize",
        )
    if config.rehearse is not None:
        raise ConfigError(
            "a rehearsal is of dynamic graph",
            got=f"fleetpipe_configs['rehearse'] = {config.rehearse!r} in static graph",
            fix="leave it out; paddle.amp.auto_cast(dtype='bfloat16') runs on CPUs in static graph",
        )
    strategy = copy.deepcopy(strategy)
    strategy.hybrid_configs = {"dp_degree": degrees.dp, "pp_degree": degrees.pp}
    running = current_job()
    with dynamic_mode():
        if running is not None:
            _change_strategy(running, degrees, strategy, config)
            return running
        distributed.forget_topology()
        role_maker, is_collective, log_level = _static_arguments
        arguments = (role_maker, is_collective, strategy, log_level)
        _begin_job(degrees, meeting.world_size(), arguments, config)
    begun = current_job()
    if begun is None:
        raise StateError(
            "the job ended while it began",
            fix="call fleet.shutdown() only when minimize has returned",
        )
    return begun


def shutdown() -> None:
    """Ends the job: closes this process's connections, so that another job can begin.

    Every rank calls it for itself; messages sent before are still delivered. If it is called while
    an error is raised (in a ``finally``, say), it reports the error to the other ranks. It undoes
    the changes to Paddle for static graph; the next ``init`` makes them again. Even if it raises,
    the job has ended and another can begin.

    Raises:
        PeerFailed: Another rank has failed, and this rank learns of it only now.
        PipelineTimeout: Another rank did not take what was sent to it within the limit.
    """
    global _static_arguments
    try:
        job.end(sys.exc_info()[1])
    finally:
        distributed.forget_topology()
        if "fleetpipe.static" in sys.modules:
            static_graph().uninstall()
        _static_arguments = None


def get_hybrid_communicate_group() -> HybridCommunicateGroup:
    """Returns the topology of the job: Paddle's own object, or a stand-in in one process.

    Raises:
        NotInitialized: There is no job.
    """
    try:
        return _fleet.get_hybrid_communicate_group()
    except (AssertionError, AttributeError):
        raise NotInitialized(
            "there is no topology before fleet.init, nor after fleet.shutdown",
            fix="call fleet.init(is_collective=True, strategy=strategy) first",
        ) from None


def _refuse_other_launchers() -> None:
    """Refuses launchers that do not connect their processes: each would train the whole model."""
    counts = {name: os.environ.get(name, "") for name in _OTHER_LAUNCHERS}
    for name, count in counts.items():
        if "PADDLE_TRAINERS_NUM" not in os.environ and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                "the processes were started by another framework's launcher, as torchrun or mpirun",
                got=f"{name}={count}, and no PADDLE_TRAINERS_NUM",
                fix=f"fleetpipe run --nproc {count} train.py, or python -m paddle.distributed"
                f".launch --nproc_per_node {count} train.py; unset {name} to play all ranks here",
            )


def _init_static(degrees: Degrees, arguments: tuple[Any, ...]) -> Fleet:
    """Stores the arguments of ``init`` in static mode; :func:`begin_static` begins the job.

    Args:
        degrees: The degrees.
        arguments: The arguments of ``init``, in order.
    """
    global _static_arguments
    role_maker, is_collective, strategy, log_level = arguments
    if degrees.pp > 1 and not strategy.pipeline:
        raise ConfigError(
            "a static program becomes a pipeline by strategy.pipeline = True",
            got=f"pp_degree={degrees.pp} and strategy.pipeline = False",
            fix="set strategy.pipeline = True, and guard the layers with device_guard('gpu:k')",
        )
    _static_arguments = (role_maker, is_collective, log_level)
    running = current_job()
    if running is not None:
        distributed.install_topology(running.hcg, copy.deepcopy(strategy))
        return _fleet
    return _fleet.init(*arguments)


def _change_strategy(
    running: Job, degrees: Degrees, strategy: Any, config: PipelineConfig, stage: int = 1
) -> Fleet:
    """Gives the running job other options; refuses other degrees.

    Args:
        running: The job.
        degrees: The degrees of ``strategy``.
        strategy: The new strategy.
        config: The options of ``strategy``.
        stage: The stage of sharding, 1 or 2.
    """
    if degrees != running.degrees:
        raise ConfigError(
            "fleet.init was called before, with other degrees",
            expected=str(running.degrees),
            got=str(degrees),
            fix="call fleet.shutdown() first",
        )
    _set_rehearsal(config)
    running.limit_waits(config.timeout)
    running.scatters_gradients = stage == 2
    running.sums_by_tree = config.sums == "tree"
    running.allow = Allow(config.allow)
    distributed.install_topology(running.hcg, copy.deepcopy(strategy))
    return _fleet


def _begin_job(
    degrees: Degrees,
    world_size: int,
    arguments: tuple[Any, ...],
    config: PipelineConfig,
    stage: int = 1,
) -> Fleet:
    """Begins a job in dynamic mode, on several ranks or in one process. Collective over the ranks.

    Args:
        degrees: The degrees.
        world_size: The number of processes.
        arguments: The arguments of ``init``, in order.
        config: The options of the strategy.
        stage: The stage of sharding, 1 or 2.
    """
    number = next(_job_numbers)
    _log.debug("job %d of this process begins: %s", number, degrees)
    strategy = arguments[2]
    if degrees.asked_pp:
        stages = "1 stage" if degrees.pp == 1 else f"{degrees.pp} stages"
        text = "%d ranks are left: the pipeline has %s, not %d"
        _log.info(text, world_size, stages, degrees.asked_pp)
    mesh = Mesh.in_order(degrees, strategy.hybrid_parallel_order)
    if world_size == 1:
        new_job = _begin_alone(degrees, arguments, config.timeout, number)
    else:
        from fleetpipe.job import paddle_groups, start

        transport = config.transport or paddle_groups.default_transport()
        paddle_groups.refuse_without_gloo(transport)
        facts = {
            **meeting.facts(degrees, config),
            "transport": transport,
            "groups by the host's memory": str(distributed.communicates_over_host()),
            "hybrid_configs": repr(strategy.hybrid_configs),
            "hybrid_configs['order']": repr(strategy.hybrid_parallel_order),
            "sharding_configs['stage']": str(stage),
        }
        groups = functools.partial(_make_groups, mesh, arguments)
        new_job = start.begin_together(mesh, facts, config.timeout, number, groups, transport)
    new_job.endings.append(_end_rehearsal)
    new_job.scatters_gradients = stage == 2
    new_job.sums_by_tree = config.sums == "tree"
    new_job.allow = Allow(config.allow)
    job.begin(new_job)
    distributed.replace_role_maker_gloo(fleet_view.Workers())
    _set_rehearsal(config)
    # One process that plays all ranks reports its progress only if somebody may read the report.
    has_readers = config.serve is not None or attempt_files.folder() is not None
    if (has_readers or not new_job.local) and new_job.leads():
        extra("view.reporting").begin(new_job, config.serve)
    if degrees.mp > 1:
        tensor_parallel.connect_shards(new_job)
    return _fleet


def _set_rehearsal(config: PipelineConfig) -> None:
    """Begins the rehearsal of half precision that the options ask for, or ends the active one."""
    if config.rehearse is not None and device_kind() != "cpu":
        log.once(_log.warning, f"nothing is rehearsed: this device has {config.rehearse} itself")
    elif config.rehearse is not None:
        _rehearsal_module().rehearse(config.rehearse)
    else:
        _end_rehearsal()


def _end_rehearsal() -> None:
    """Ends the active rehearsal, if there is one."""
    if rehearsal_dtype() is not None:
        _rehearsal_module().end_rehearsal()


def _rehearsal_module() -> Any:
    """Returns the module of rehearsals, which only few jobs load."""
    return importlib.import_module("fleetpipe.paddle_api.rehearsal")


def _begin_alone(degrees: Degrees, arguments: tuple[Any, ...], timeout: float, number: int) -> Job:
    """Returns the job of one process that plays all ranks.

    Args:
        degrees: The degrees.
        arguments: The arguments of ``init``, in order.
        timeout: The limit of waits, in seconds.
        number: The number of the job in this process.
    """
    role_maker, is_collective, strategy, log_level = arguments
    _init_alone(role_maker, is_collective, log_level)
    hcg = distributed.LocalTopology(degrees.pp)
    distributed.install_topology(hcg, copy.deepcopy(strategy))
    if degrees.pp > 1:
        _log.info(
            "this one process plays all %d ranks of the pipeline: parameters() has the whole model "
            "here, and on ranks a stage",
            degrees.pp,
        )
    return Job(degrees, hcg, timeout, number)


def _make_groups(mesh: Mesh, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Makes Paddle create its groups. Collective over the job.

    Args:
        mesh: The coordinates of all ranks.
        arguments: The arguments of ``init``, in order.

    Returns:
        Paddle's topology; and Paddle's group of the ranks that have the same parameters, or None if
        one axis spans them, which has a group already.
    """
    role_maker, is_collective, strategy, log_level = arguments
    strategy = copy.deepcopy(strategy)
    # Fleet computes dp_degree=-1 from mp_degree and pp_degree alone; 2.6.2 has fewer axes.
    options, degrees = {*strategy.hybrid_configs}, mesh.degrees.configs()
    strategy.hybrid_configs = {name: n for name, n in degrees.items() if name in options}
    axes = DistributedStrategy().hybrid_parallel_order
    if not {*axes}.issubset(strategy.hybrid_parallel_order):  # Paddle looks for each of its axes
        order = complete_order(strategy.hybrid_parallel_order)
        strategy.hybrid_parallel_order = [axis for axis in order if axis in axes]
    states = GeneratorStates()
    with fleet_view.building_topology(mesh):
        paddle_fleet.init(role_maker, is_collective, strategy, log_level)
    if strategy.tensor_parallel_configs["tensor_init_seed"] == -1:
        # With mp_degree above 1 Paddle replaces the user's seed by another number on each rank.
        states.put_back()
    return paddle_fleet.get_hybrid_communicate_group(), fleet_view.group_of_copies(mesh)


@functools.lru_cache(maxsize=1)
def _init_alone(role_maker: Any, is_collective: bool, log_level: int | str) -> None:
    """Makes Paddle's functions such as ``fleet.worker_index`` return a single process's values."""
    with warnings.catch_warnings():
        # Paddle warns for each group that this is no parallel environment.
        warnings.simplefilter("ignore")
        # At INFO it would log groups of one rank, and a pp_degree of 1.
        level = "WARNING" if log_level == "INFO" else log_level
        paddle_fleet.init(role_maker, is_collective, None, level)
        paddle_fleet.utils.log_util.set_log_level(log_level)


def end_with_process() -> None:
    """Ends the job at the exit of the process, and sends an uncaught error to the other ranks."""
    error = watch.error_at_exit()
    if isinstance(error, AttributeError) and _STOCK_ON_CPU in str(error):
        _log.error(_STOCK_HINT)
    if isinstance(error, AssertionError) and str(error).startswith(_STOCK_ALONE):
        _log.error(_STOCK_ALONE_HINT)
    try:
        job.end(error)
    except FleetPipeError as failure:
        # Raised here, Python would print it and exit with 0.
        watch.end_with_error(failure)


def end_job_at_exit() -> None:
    """Makes :func:`end_with_process` run at the exit of this process."""
    watch.note_exits()
    atexit.register(end_with_process)

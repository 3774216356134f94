"""The classes that a script uses for a static pipeline: the optimizer and the data loader.

``StaticOptimizer.minimize`` creates the pipeline. If the script marks values for recompute, a stage
stores only these from forward to backward. A pipeline takes accumulate_steps items of a
``DataLoader`` in each run; the loader has the methods of Paddle's, which 3.3 does not have any
more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleetpipe.aliases import Op, Optimizer, Program, Strategy, Variable
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job.job import Job
from fleetpipe.job.optimizer_table import require_optimizer
from fleetpipe.mesh.axes import Degrees
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import dict_groups, optimized_parameters
from fleetpipe.paddle_api.static import (
    has_step_of_its_own,
    is_decorated,
    is_pir,
    numpy_dtype_name,
    unwrap_recompute,
)
from fleetpipe.representation import shows
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.registry import default_chunks
from fleetpipe.static import ir, saved_state
from fleetpipe.static.cut import GraphReader, Split, ranks_for, split
from fleetpipe.static.graph import Item
from fleetpipe.static.pipeline_programs import attach, refuse_second
from fleetpipe.static.run.feeding import merge_feeds
from fleetpipe.static.run.pipeline import StaticPipeline

#: ``begin(degrees, config)`` begins the job, or returns the current job if it has these degrees.
Begin = Callable[[Degrees, PipelineConfig], Job]
#: Switches of a strategy that a static pipeline does not support.
_REFUSED_SWITCHES = (
    *("amp", "sharding", "gradient_merge", "tensor_parallel", "localsgd", "adaptive_localsgd"),
    *("dgc", "lars", "lamb", "qat", "asp", "fp16_allreduce"),
)

#: Methods of an optimizer that would train the whole program on each rank by itself.
_PARTS_OF_MINIMIZE = ("backward", "apply_gradients", "apply_optimize", "step")

#: A sample: a tuple with numbers or an array for each feed.
Sample = Sequence[Any]
Samples = Callable[[], Iterable[Any]]
_loaders: weakref.WeakKeyDictionary[Program, list[DataLoader]] = weakref.WeakKeyDictionary()


@shows("wrapped", schedule="_config.schedule")
class StaticOptimizer:
    """Wraps the user's optimizer: :meth:`minimize` makes a pipeline of the loss's program.

    All other attributes are those of the user's optimizer.
    """

    def __init__(
        self, optimizer: Optimizer, strategy: Strategy, begin: Begin, world_size: int
    ) -> None:
        """Wraps an optimizer.

        Args:
            optimizer: Any Paddle optimizer.
            strategy: Fleet's strategy with ``pipeline`` switched on.
            begin: Begins the job, when ``minimize`` knows the number of stages.
            world_size: The number of processes of the job.

        Raises:
            ConfigError: The strategy or the optimizer asks for something that a static pipeline
                cannot do.
        """
        self.wrapped, self._checkpoints = unwrap(optimizer, strategy)
        self._strategy, self._begin, self._world_size = strategy, begin, world_size
        self._config = PipelineConfig.from_strategy(strategy)
        dygraph_only = {"guards": self._config.guards > 0, "order": self._config.order != "fixed"}
        for option, is_set in dygraph_only.items():
            if is_set:
                raise ConfigError(
                    f"{option} is for dynamic graph: a static pipeline has none",
                    fix="leave it out of strategy.fleetpipe_configs",
                )
        switched_on = [name for name in _REFUSED_SWITCHES if getattr(strategy, name, False) is True]
        if switched_on:
            raise ConfigError(
                f"this version does not run strategy.{switched_on[0]} in a static pipeline",
                fix=f"set strategy.{switched_on[0]} = False",
            )
        if is_decorated(self.wrapped):
            raise amp_refusal()
        if has_step_of_its_own(self.wrapped):
            raise ConfigError(
                f"a static pipeline does not run {type(self.wrapped).__name__}, which does more "
                "than update parameters",
                fix="pass the optimizer inside of it; accumulate_steps of pipeline_configs merges "
                "gradients",
            )

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameters: Iterable[Variable | str] | None = None,
        no_grad_set: object = None,
        parameter_list: Iterable[Variable | str] | None = None,
    ) -> tuple[list[Op], list[Variable]]:
        """Cuts the loss's program into stages. Collective over the job.

        Args:
            loss: The loss, with one element.
            startup_program: The startup program of the loss's program; None for the default one.
            parameters: The parameters to train, or their names; None for those of the optimizer,
                by default all that need a gradient.
            no_grad_set: Must be empty or None.
            parameter_list: ``parameters``, as Fleet's own ``minimize`` calls it.

        Returns:
            Two empty lists instead of Paddle's operations and gradients: the program keeps only its
            forward, and the stages have the backward.

        Raises:
            PartitionError: The guards of the program do not define stages.
            BoundaryError: An operation cannot be cut.
            ConfigError: The stages do not fit the ranks, or an option is wrong.
        """
        if no_grad_set:
            raise ConfigError(
                "minimize of a static pipeline takes no no_grad_set",
                fix="set stop_gradient = True on what is not to be trained",
            )
        if any(size != 1 for size in loss.shape):
            raise ConfigError(
                "the loss of a pipeline has one element in each micro-batch",
                got=f"a loss of shape {list(loss.shape)}",
                fix="under the guard of the last stage: loss = paddle.mean(loss)",
            )
        program = loss.block.program
        refuse_second(program)
        startup = startup_program or paddle.static.default_startup_program()
        reader = ir.read(program)
        number = reader.number(loss)
        trained = _names_to_train(self.wrapped, parameters or parameter_list)
        cut = replace(split(reader.graph), trained=trained)
        cut = mark_checkpoints(cut, reader, self._checkpoints)
        if number is None or cut.stage_of_value[number] is None:
            raise ConfigError(
                "the loss is not computed by any stage of its program",
                fix="compute it under the guard of the last stage",
            )
        degrees, chunks = self._resolve_degrees(cut)
        schedule = self._config.schedule_for(degrees.pp, chunks, cut.edges)
        _refuse_schedule(schedule, program)
        job = self._begin(degrees, self._config)
        require_optimizer(self.wrapped, job)
        if self._config.loss_reduction == "tokens":
            raise ConfigError(
                "a static pipeline does not count the tokens of a loss",
                got="fleetpipe_configs['loss_reduction'] = 'tokens'",
                fix="set it to 'mean' or 'sum', or use dynamic graph",
            )
        micro_batches = self._config.micro_batches if self._config.loss_reduction == "mean" else 1
        replicas = degrees.dp if scale_strategy(self._strategy) == "avg" else 1
        weight = 1.0 / (micro_batches * replicas)
        pipeline = StaticPipeline(
            reader, cut, schedule, job, self._config, self.wrapped, (number, weight)
        )
        attach(program, startup, pipeline)
        saved_state.add_checkpoint_part(program, pipeline)
        return [], []

    def _resolve_degrees(self, cut: Split) -> tuple[Degrees, int]:
        """Returns the degrees of the job, and the number of stages on each rank.

        Without ``pp_degree`` in the strategy, the stages of the cut determine it.

        Raises:
            ConfigError: The stages do not fit the ranks, or an axis is not for static graph.
        """
        configs = self._strategy.hybrid_configs
        pp_degree = int(configs["pp_degree"]) if configs["pp_degree"] > 1 else None
        interleaved = default_chunks(self._config.schedule)
        ranks, chunks = ranks_for(cut, pp_degree, self._world_size, interleaved)
        wanted = {**configs, "pp_degree": ranks}
        if pp_degree is None:
            wanted["dp_degree"] = -1
        degrees = Degrees.resolve(wanted, self._world_size)
        if self._strategy.sync_batch_norm and degrees.dp > 1:
            raise ConfigError(
                "a static pipeline does not share statistics of batches over replicas",
                got=f"strategy.sync_batch_norm = True, {degrees.dp} replicas",
                fix="strategy.sync_batch_norm = False: each replica has those of its own rows",
            )
        degrees.refuse_beyond(("pp", "dp"), "use dynamic graph, or dp_degree for these ranks")
        return degrees, chunks

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":
            raise AttributeError(name)
        if name in _PARTS_OF_MINIMIZE:
            raise ConfigError(
                f"a static pipeline has no {name} of its own",
                cause="each stage has its backward and its optimizer step, which minimize makes",
                fix="fleet.distributed_optimizer(optimizer, strategy).minimize(loss)",
            )
        return getattr(self.wrapped, name)


def refuse_stages(program: Program) -> None:
    """Refuses a program that was built in stages, if ``strategy.pipeline`` is off."""
    graph = ir.read(program).graph
    tagged = {op.tag: op for op in graph.operations if op.tag is not None and op.tag >= 0}
    if len(tagged) > 1:
        raise ConfigError(
            "the program is built in stages, and strategy.pipeline is False",
            where=f"{tagged[max(tagged)]} is of stage {max(tagged)}",
            fix="strategy.pipeline = True, and fleet.distributed_optimizer(optimizer, strategy)",
        )


def amp_refusal() -> ConfigError:
    """Returns the error of ``paddle.static.amp.decorate`` in or around a pipeline's optimizer."""
    return ConfigError(
        "this version does not run paddle.static.amp.decorate in a static pipeline",
        fix="give distributed_optimizer the optimizer itself; build layers under "
        "paddle.amp.auto_cast(dtype='bfloat16')",
    )


def _refuse_schedule(schedule: Schedule, program: Program) -> None:
    """Refuses a schedule of sequence chunks; for an older Program, one that splits the backward."""
    stock = "schedule_mode 1F1B, FThenB, Eager1F1B or Interleaved1F1B"
    if schedule.slices > 1:
        raise ConfigError(
            f"a static pipeline does not run {schedule.name}, which cuts sequences into slices",
            cause="a program cannot keep keys and values between slices",
            fix=stock,
        )
    kinds = {action.kind for row in schedule.actions for item in row for action in parts(item)}
    if not is_pir(program) and not kinds <= {"F", "B"}:
        raise ConfigError(
            f"a pipeline of an older Program does not run {schedule.name}, which splits the "
            "backward",
            cause="only programs of Paddle's newer IR, PIR, can be cut there",
            fix=f"{stock}, or Paddle 3.3 without FLAGS_enable_pir_api=0",
        )


def _names_to_train(
    optimizer: Optimizer, parameters: Iterable[Variable | str] | None
) -> frozenset[str] | None:
    """Returns the names of the parameters that an optimizer trains; None if it trains all."""
    if dict_groups(optimizer):
        raise ConfigError(
            "Paddle's static graph has no groups of parameters",
            fix="pass one list; a rate of a parameter's own is ParamAttr(learning_rate=..)",
        )
    chosen = parameters or optimized_parameters(optimizer)
    names = [item if isinstance(item, str) else item.name for item in chosen]
    return frozenset(names) or None


def unwrap(
    optimizer: Optimizer, strategy: Strategy
) -> tuple[Optimizer, Sequence[Variable | str] | None]:
    """Returns the optimizer that updates parameters, and the values marked for recompute.

    Args:
        optimizer: A Paddle optimizer, or ``paddle.incubate.optimizer.RecomputeOptimizer`` around
            one.
        strategy: Fleet's strategy.

    Returns:
        The optimizer, and the marked values or their names; None without recompute.

    Raises:
        ConfigError: Recompute is switched on without checkpoints, or with offloading.
    """
    optimizer, checkpoints, offload = unwrap_recompute(optimizer)
    if strategy.recompute:
        configs = strategy.recompute_configs
        checkpoints = [*(checkpoints or ()), *configs["checkpoints"]]
        offload = offload or configs["enable_offload"]
    if offload:
        raise ConfigError(
            "a static pipeline keeps checkpoints where they are: it offloads nothing",
            fix="strategy.recompute_configs = {'checkpoints': [..], 'enable_offload': False}",
        )
    if checkpoints is not None and not checkpoints:
        raise ConfigError(
            "recompute is switched on, and no checkpoint is named",
            fix="strategy.recompute_configs = {'checkpoints': [name, ..]}, where name is "
            "fleetpipe.static.name_of(value)",
        )
    return optimizer, checkpoints


def mark_checkpoints(
    split: Split, reader: GraphReader, checkpoints: Sequence[Variable | str] | None
) -> Split:
    """Returns a cut with the values that recompute stores, and from which it computes others.

    Args:
        split: The cut.
        reader: The reader of the program.
        checkpoints: The values that the script marks for recompute, or their names; None without
            recompute.

    Raises:
        ConfigError: A marked value is not in the program.
    """
    if checkpoints is None:
        return split
    numbers = set()
    for value in checkpoints:
        number = reader.number(value)
        if number is None:
            raise ConfigError(
                f"the program has no value {str(value)!r} to be a checkpoint of recompute",
                cause="under PIR a value has no name until it is asked for one",
                fix="name it by fleetpipe.static.name_of(value), before minimize",
            )
        numbers.add(number)
    return replace(split, checkpoints=frozenset(numbers))


@shows(feeds="_names")
class DataLoader:
    """Feeds a program by itself: between ``start`` and ``reset``, ``run`` needs no ``feed``.

    Each item of the generator is a micro-batch, which is read when it is needed. At the end of the
    data, ``exe.run`` raises ``paddle.base.core.EOFException`` on all ranks in the same step; an
    incomplete last group of micro-batches is dropped.
    """

    def __init__(self, feed_list: Sequence[Variable]) -> None:
        """Creates a loader for the default main program.

        Args:
            feed_list: Results of ``paddle.static.data``, in the order of the entries of a sample.
        """
        self._names = [feed.name for feed in feed_list]
        self._shapes = [tuple(feed.shape) for feed in feed_list]
        self._dtypes = [numpy_dtype_name(feed) for feed in feed_list]
        self._source: Callable[[], Iterator[Item]] | None = None
        self._items: Iterator[Item] | None = None
        _loaders.setdefault(paddle.static.default_main_program(), []).append(self)

    @staticmethod
    def from_generator(
        feed_list: Sequence[Variable],
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = False,
    ) -> DataLoader:
        """Creates a loader with Paddle's arguments.

        Args:
            feed_list: Results of ``paddle.static.data``, in the order of the entries of a sample.
            capacity: Ignored.
            use_double_buffer: Ignored.
            iterable: Must be False; otherwise pass an iterator as ``feed``.

        Raises:
            ConfigError: ``iterable`` is True.
        """
        if iterable:
            raise ConfigError(
                "this loader feeds its program by itself",
                got="iterable=True",
                fix="iterable=False; or give exe.run an iterator over micro-batches: "
                "items = iter(loader); exe.run(main, feed=items, ..)",
            )
        return DataLoader(feed_list)

    def set_sample_generator(
        self, reader: Samples, batch_size: int, drop_last: bool = True, places: object = None
    ) -> DataLoader:
        """Takes a generator of samples, of which ``batch_size`` form a micro-batch.

        Args:
            reader: Called without arguments; yields samples, each a tuple with an entry per feed.
            batch_size: The number of rows of a micro-batch.
            drop_last: Must be True: an incomplete last micro-batch is dropped.
            places: Ignored.

        Raises:
            ConfigError: ``drop_last`` is False.
        """
        if not drop_last:
            raise ConfigError(
                "a pipeline cannot take an incomplete micro-batch",
                got=f"drop_last={drop_last!r}",
                fix="pass drop_last=True",
            )

        def micro_batches() -> Iterator[Sequence[Sample]]:
            """Yields lists of ``batch_size`` samples; drops an incomplete last one."""
            samples: list[Sample] = []
            for sample in reader():
                samples.append(sample)
                if len(samples) == batch_size:
                    yield samples
                    samples = []

        return self.set_sample_list_generator(micro_batches)

    def set_sample_list_generator(self, reader: Samples, places: object = None) -> DataLoader:
        """Takes a generator of lists of samples; each list is a micro-batch.

        Args:
            reader: Called without arguments; yields lists of samples.
            places: Ignored.
        """
        return self.set_batch_generator(
            lambda: (
                [self._stack_entries(feed, entries) for feed, entries in enumerate(zip(*samples))]
                for samples in reader()
            )
        )

    def set_batch_generator(self, reader: Samples, places: object = None) -> DataLoader:
        """Takes a generator of micro-batches, each a tuple with an array per feed.

        Args:
            reader: Called without arguments; yields micro-batches.
            places: Ignored.
        """
        self._source = lambda: (dict(zip(self._names, batch)) for batch in reader())
        return self

    def start(self) -> None:
        """Starts an epoch: calls the generator.

        Raises:
            StateError: There is no generator, or an epoch is running.
        """
        if self._source is None:
            raise StateError("the loader has no generator", fix="loader.set_batch_generator(..)")
        if self._items is not None:
            raise StateError("the loader was started before", fix="loader.reset() after an epoch")
        self._items = self._source()

    def reset(self) -> None:
        """Stops reading, so that the next :meth:`start` begins a new epoch."""
        self._items = None

    def _stack_entries(self, feed: int, entries: Sequence[Any]) -> np.ndarray:
        """Returns the array of a feed, one row for each sample.

        Args:
            feed: The index of the feed in ``feed_list``.
            entries: Numbers or arrays for this feed, one of each sample.
        """
        array = np.stack([np.asarray(entry) for entry in entries]).astype(self._dtypes[feed])
        shape = self._shapes[feed][1:]
        return array if -1 in shape else array.reshape(len(entries), *shape)


def items_for(program: Program, feed: object) -> Iterator[Item] | None:
    """Returns the iterator over micro-batches that a run of a pipeline's program reads.

    Args:
        program: The program to run.
        feed: The ``feed`` of ``run``: a mini-batch, an iterator over micro-batches, or nothing if a
            loader of the program is started.

    Returns:
        The iterator; None if ``feed`` is a mini-batch, or nothing is fed and there is no loader.

    Raises:
        StateError: Nothing is fed, and the program's loader is not started.
    """
    if isinstance(feed, Iterator):
        return feed
    if feed:
        return None
    loaders = _loaders.get(program, ())
    started = [loader._items for loader in loaders if loader._items is not None]
    if loaders and not started:
        raise StateError(
            "the program reads from a loader that was not started",
            fix="loader.start() before each epoch, loader.reset() after it; or feed by hand",
        )
    if len(started) > 1:
        return (merge_feeds(dicts) for dicts in zip(*started))
    return started[0] if started else None

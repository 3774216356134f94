"""The pipeline of a minimized program, which ``Executor.run`` runs on every rank alike."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fleetpipe.aliases import Optimizer, Place, Program, Scope, Tensor, Variable
from fleetpipe.config import PipelineConfig
from fleetpipe.engine.trace import JobTrace
from fleetpipe.errors import StateError
from fleetpipe.job import meeting
from fleetpipe.job.job import Job, current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_api.optimizer import current_rate
from fleetpipe.paddle_api.static import EOFException, dynamic_tensor, found_tensor
from fleetpipe.representation import shows
from fleetpipe.schedules import Schedule
from fleetpipe.static.cut import GraphReader, Split
from fleetpipe.static.run import compiled_pipeline
from fleetpipe.static.run.compiled_pipeline import Compiled, Recipe
from fleetpipe.static.run.feeding import (
    FedBatch,
    Fetch,
    ProgramBatch,
    join_fetched,
    take_micro_batches,
)
from fleetpipe.static.run.static_stage import Streams


@shows("schedule")
class StaticPipeline:
    """Runs a program that was cut into stages. Each run is collective over the job.

    Attributes:
        split: The cut of the program.
        schedule: The schedule.
        job: The job whose ranks run the pipeline.
        local: Whether this one process plays all ranks.
        rank: This process's rank in the pipeline; 0 if it plays all ranks.
        optimizer: The user's optimizer.
        persistable: Names of the parameters and statistics of this process's stages, sorted.
        elsewhere: Names of the parameters and statistics that are on other ranks only.
        declared: The shape of each parameter and statistic of all stages by name, in order of
            creation.
        parameters: Names of the parameters that this process trains, sorted.
        optimizer_state: The optimizer's variables of each of these parameters, by its name.
        optimizer_variables: Names of all variables of the optimizer for these parameters.
        rate_name: The variable of the learning rate; None if this process trains nothing.
    """

    def __init__(
        self,
        reader: GraphReader,
        split: Split,
        schedule: Schedule,
        job: Job,
        config: PipelineConfig,
        optimizer: Optimizer,
        loss: tuple[int, float],
    ) -> None:
        """Builds the backward of this process's stages and the optimizer step. Collective.

        Args:
            reader: The reader of the program.
            split: The cut of the program.
            schedule: The schedule.
            job: The job whose ranks run it.
            config: The options.
            optimizer: The user's optimizer.
            loss: The number of the loss among the program's values, and the loss's gradient.

        Raises:
            ConfigError: A pipeline cannot run the program or the optimizer, or the ranks have built
                different programs.
        """
        self.split, self.schedule, self.job, self.optimizer = split, schedule, job, optimizer
        self.local, self.rank = job.local, job.group().rank
        self._reader, self._config = reader, config
        with job.guarded(lambda: "building the static pipeline"):
            placement = schedule.placement
            self._stages = [*range(split.stages)] if job.local else placement.stages_of(self.rank)
            facts = self._facts_to_agree(*loss)
            self._digest = facts["program"][:8]
            job.require_agreement(facts)
            self._recipe = self._build_recipe(loss)
        self.persistable = sorted({n for s in self._stages for n in split.persistable_of(s)})
        self.elsewhere = split.persistable.difference(self.persistable)
        self.declared = {n: s for n, s in reader.declared.items() if n in split.persistable}
        self.parameters, update = self._recipe.parameters, self._recipe.update
        self.optimizer_state = {} if update is None else update.state
        self.optimizer_variables = () if update is None else update.variables
        self.rate_name = None if update is None else update.rate_name
        #: The stages that draw random numbers, ascending.
        pairs = zip(split.stage_of, split.graph.operations)
        self._random_stages = sorted({s for s, op in pairs if op.is_random and s is not None})
        self._compiled: Compiled | None = None
        self._streams: Streams | None = None
        self._streams_to_begin: Mapping[int, Any] = {}

    @property
    def peak_held(self) -> dict[int, int]:
        """The most unreleased forwards in the last run, by rank that this process plays."""
        return {} if self._compiled is None else self._compiled.engine.peak_held

    def start(self, run: Callable[[Program], object], startup: Program, scope: Scope) -> None:
        """Initialises the variables of this process's stages and the optimizer.

        Collective over the job: replicas get the parameters of the first.

        Args:
            run: Runs a program in ``scope``.
            startup: The startup program of the whole program.
            scope: The scope of the variables.
        """
        self.require_current()
        run(startup if self.local else self._reader.startup(startup, self.persistable))
        if self._recipe.update is not None:
            run(self._recipe.update.startup)
        tensors = [found_tensor(scope, name) for name in self.persistable]
        with dynamic_mode(), self.job.guarded(lambda: "initialising the static pipeline"):
            self.job.replicas().broadcast_each(
                [(dynamic_tensor(tensor), 0) for tensor in tensors if tensor is not None]
            )
        self._compiled = self._streams = None
        self._streams_to_begin = {}

    @property
    def leads_random(self) -> bool:
        """Whether this process has the first stage that draws, from the default generator."""
        return bool({*self._random_stages[:1]}.intersection(self._stages))

    @property
    def streams(self) -> Mapping[int, Any]:
        """The random states of this process's other stages that draw; empty before a batch."""
        return self._streams_to_begin if self._streams is None else self._streams.states

    def begin_streams(self, states: Mapping[int, Any]) -> None:
        """Restarts the random streams of this process's stages.

        Args:
            states: States that :attr:`streams` has returned, by stage. A stream without a state
                starts from the current seed.
        """
        self._streams_to_begin = states
        if self._streams is not None:
            self._streams.begin(states)

    def run(
        self,
        place: Place,
        feed: object,
        fetches: Sequence[Variable | str],
        scope: Scope,
        return_numpy: bool,
    ) -> list[np.ndarray | Tensor | None]:
        """Trains on one mini-batch. Collective over the job.

        Args:
            place: The device.
            feed: The mini-batch: arrays by name, of accumulate_steps x micro_batch_size rows. Or an
                iterator, from which accumulate_steps micro-batches are taken.
            fetches: Values of the program, or their names.
            scope: The scope of the variables.
            return_numpy: Whether to return arrays instead of dynamic tensors.

        Returns:
            A value for each of ``fetches`` on the rank that owns it, None elsewhere; with the
            option ``fetch_broadcast`` on every rank.

        Raises:
            ConfigError: The feed or a fetch does not fit.
            StateError: The job of the program has ended, or Paddle is in dynamic mode.
            UsageError: The feed or a fetch has a wrong type.
            EOFException: The iterator of some rank has too few items left; raised on every rank.
            PeerFailed: Another rank left.
            PipelineTimeout: A message did not come within the limit.
        """
        self.require_current()
        config, healing = self._config, self.job.healing
        mini_batch = feed
        with self._sharing_errors(lambda: "taking the next mini-batch"):
            if isinstance(feed, Iterator):
                mini_batch = take_micro_batches(feed, config.micro_batches)
        with self._sharing_errors(self._where):
            wanted = [Fetch.from_target(target, self._reader, self.split) for target in fetches]
            fed = None
            if mini_batch is not None or not isinstance(feed, Iterator):
                fed = FedBatch(
                    mini_batch,
                    self._reader.data,
                    config.micro_batches,
                    config.micro_batch_size,
                    place,
                    copied=healing is not None,
                )
                needed = {name for stage in self._recipe.stages.values() for name in stage.feeds}
                fed.require(needed)
            self._compile(wanted, scope, place)
        if self._streams is not None:
            self._streams.follow_seed()
        train = functools.partial(self._train_batch, wanted, fed, scope, place)
        batch = ProgramBatch(fed, train)
        if healing is None:
            batch.train()
        else:
            healing.train(lambda same: same, batch, self.optimizer)
        if return_numpy:
            return batch.results
        with dynamic_mode():
            return [None if array is None else paddle.to_tensor(array) for array in batch.results]

    def _train_batch(
        self, wanted: Sequence[Fetch], fed: FedBatch | None, scope: Scope, place: Place
    ) -> list[np.ndarray | None]:
        """Trains on a mini-batch, and returns the fetched values. Collective over the job.

        Args:
            wanted: The values to fetch.
            fed: The mini-batch; None at the end of this rank's data.
            scope: The scope of the variables.
            place: The device.

        Raises:
            EOFException: Some rank has no more data: the epoch ends, and no rank trains.
        """
        # Compiled anew if a batch that fetched other values has run in between.
        job, compiled = self.job, self._compile(wanted, scope, place)
        job.call("runs the program")
        with dynamic_mode(), job.guarded(self._where):
            ends = self._any_data_ended(fed is None)
        if fed is None or ends:
            raise EOFException("there is no data: the epoch ends on every rank")
        with dynamic_mode(), job.guarded(self._where):
            first = job.replicas().rank * self._config.micro_batches
            compiled.stage.begin(fed.put, first)
            try:
                with job.limited_by_card():
                    compiled.observers.begin(None)
                    compiled.engine.run({"REDUCE": compiled.reduce, "STEP": compiled.step}, first)
                    compiled.observers.end()
            except BaseException:
                compiled.drop_gradients()
                raise
            results = [self._fetched_value(fetch, compiled, scope) for fetch in wanted]
            if self._config.fetch_broadcast:
                return [self._broadcast_from_owner(*pair) for pair in zip(wanted, results)]
            return results

    def _any_data_ended(self, ends: bool) -> bool:
        """Returns whether the data of some rank has ended. Collective over the job.

        Args:
            ends: Whether the data of this rank has ended.

        Raises:
            StateError: The ranks run different programs, or have different learning rates.
        """
        rate = current_rate(self.optimizer)
        program = f"the program {self._digest} with the learning rate {rate!r}"
        for group in (self.job.group(), self.job.replicas()):
            programs, ends_by_rank = zip(*group.all_gather((program, ends)))
            for rank, rank_program in enumerate(programs):
                if rank_program != programs[0]:
                    raise StateError(
                        "the ranks of a pipeline do not run the same",
                        expected=f"as on rank 0: {programs[0]}",
                        got=f"on rank {rank}: {rank_program}",
                        cause="each rank runs the same programs in one order, and steps its "
                        "scheduler alike; a loss that is fetched is None on all ranks but one",
                        fix="strategy.fleetpipe_configs = {'fetch_broadcast': True}, for "
                        "scheduler.step(loss) on every rank",
                    )
            ends = any(ends_by_rank)
        return ends

    @contextmanager
    def _sharing_errors(self, where: Callable[[], str]) -> Iterator[None]:
        """Opens a context in which an error of this rank is raised on all ranks too.

        Other ranks may wait for this one. The death of another rank is noticed only in the batch,
        which can run again.

        Args:
            where: Returns what this rank does, for messages of all ranks.
        """
        self.job.progress.action = where
        try:
            yield
        except BaseException:
            with self.job.guarded(where):
                raise

    def require_current(self) -> None:
        """Raises StateError if the job of the pipeline is no longer the current one."""
        if current_job() is not self.job:
            raise StateError(
                "the job that this pipeline belongs to has ended",
                fix="build and minimize the program again after fleet.init",
            )

    def _compile(self, wanted: Sequence[Fetch], scope: Scope, place: Place) -> Compiled:
        """Returns the compiled pipeline; compiles it again for another scope or new fetches."""
        fetches = frozenset(fetch.number for fetch in wanted if fetch.stage is not None)
        compiled = self._compiled
        if compiled is not None and compiled.scope is scope and fetches <= compiled.fetches:
            return compiled
        if compiled is not None:
            fetches |= compiled.fetches
        if paddle.in_dynamic_mode():
            raise StateError("a pipeline runs in static mode", fix="paddle.enable_static()")
        if self._streams is None:
            self._streams = Streams(self._random_stages, self._stages, place)
            self._streams.begin(self._streams_to_begin)
        programs = self._recipe.cut(fetches)
        with dynamic_mode():
            self._compiled = Compiled(self._recipe, programs, self._streams, fetches, scope, place)
        return self._compiled

    def _fetched_value(self, fetch: Fetch, compiled: Compiled, scope: Scope) -> np.ndarray | None:
        """Returns the value of a fetch in the last batch; None if this process does not have it."""
        if fetch.variable is not None:
            if fetch.variable not in self.persistable:
                return None
            return np.array(found_tensor(scope, fetch.variable))
        values = compiled.stage.fetched.get(fetch.number)
        if values is None:
            return None
        return join_fetched(fetch, [values[k] for k in sorted(values)], self._config.fetch)

    def _broadcast_from_owner(self, fetch: Fetch, result: np.ndarray | None) -> np.ndarray:
        """Returns a fetched value on every rank. Collective over the pipeline.

        Args:
            fetch: The entry of ``fetch_list``.
            result: The value on the rank that owns it, else None.
        """
        stage = fetch.stage
        if stage is None:  # a parameter: the first stage that has it
            stages = range(self.split.stages)
            stage = next(s for s in stages if fetch.variable in self.split.persistable_of(s))
        owner = self.schedule.placement.rank_of(stage)
        value = None if result is None else paddle.to_tensor(result)
        return np.array(self.job.group().broadcast(value, owner))

    def _build_recipe(self, loss: tuple[int, float]) -> Recipe:
        """Builds the stages and the optimizer step of this process. Collective."""
        group = self.job.group()
        stages = {stage: self._reader.stage(self.split, stage, *loss) for stage in self._stages}
        parameters = sorted({name for stage in stages.values() for name in stage.accumulators})
        if self.job.alone:
            # A process that replaces a rank is not connected yet: it builds what the ranks gather.
            parameters_by_rank = self._parameters_by_rank(loss)
        else:
            parameters_by_rank = group.all_gather(parameters)
        users: dict[str, list[int]] = {}
        for rank, names in enumerate(parameters_by_rank):
            for name in names:
                users.setdefault(name, []).append(rank)
        users = dict(sorted(users.items()))
        clipped = [name for name in parameters if name not in self._reader.unclipped]
        limit = None
        if group.ranks > 1:
            limit = compiled_pipeline.global_norm_limit(self.optimizer, self.job)
        if self._reader.unclipped.issuperset(users):
            limit = None
        update = None
        if parameters:
            multiplied = () if limit is None else clipped
            update = self._reader.update(self.split.names, self.optimizer, parameters, multiplied)
        trace = None
        if self._config.trace is not None and self.job.leads("pp"):
            trace = JobTrace(self._config.trace, self.schedule, self.job)
        return Recipe(
            split=self.split,
            plan=self.schedule.lower(self.split.edges),
            stages=stages,
            update=update,
            optimizer=self.optimizer,
            parameters=parameters,
            shared=[name for name, ranks in users.items() if len(ranks) > 1],
            counted=[name for name in clipped if users[name][0] == group.rank],
            limit=limit,
            job=self.job,
            trace=trace,
        )

    def _parameters_by_rank(self, loss: tuple[int, float]) -> list[list[str]]:
        """Returns the parameters that each rank trains, by building the stages of all ranks."""
        trained: list[set[str]] = [set() for _ in range(self.job.group().ranks)]
        for stage in range(self.split.stages):
            built = self._reader.stage(self.split, stage, *loss)
            trained[self.schedule.placement.rank_of(stage)].update(built.accumulators)
        return [*map(sorted, trained)]

    def _facts_to_agree(self, loss: int, weight: float) -> dict[str, str]:
        """Returns texts that must be equal on all ranks, by their names in messages."""
        facts = meeting.facts(self._config)
        facts["program"] = hashlib.sha256(self.split.graph.text().encode()).hexdigest()
        facts["cut"] = f"{self.split.stages} stages, edges {list(map(str, self.split.edges))}"
        facts["loss"] = f"value {loss}, gradient {weight!r}"
        return facts

    def _where(self) -> str:
        """Returns what this rank does now, for error messages."""
        return "compiling" if self._compiled is None else self._compiled.engine.where()

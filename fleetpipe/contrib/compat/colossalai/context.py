"""The configuration of a program, its job, this process's rank (``gpc``), and the engine.

``launch_from_torch`` reads a configuration and begins the job. ``initialize`` makes the engine,
which runs batches.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import os
import random
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fleetpipe import fleet
from fleetpipe.aliases import Nest, Optimizer, Scheduler, Tensor
from fleetpipe.contrib.compat.colossalai.logging import get_dist_logger
from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.batch.micro_batches import join_outputs
from fleetpipe.dygraph.nest import map_tensors, tensors_of
from fleetpipe.errors import ConfigError, StateError, UsageError, require_whole
from fleetpipe.job.job import Job, required_job
from fleetpipe.paddle_api import paddle

#: The kinds of configurations that a program may pass.
ConfigSource = Mapping[str, Any] | str | os.PathLike[str]

#: Entries of a configuration that have an effect, or none but are accepted.
_USED_ENTRIES = ("NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE", "SCHEDULE", "parallel")
#: Entries of ColossalAI that are refused, each with what to use instead.
_REFUSED_ENTRIES = {
    "fp16": "leave it out: on CPU Paddle computes in float32; else use strategy.amp of fleet",
    "zero": "leave it out, or use sharding_degree of fleetpipe.fleet",
    "gradient_accumulation": "raise NUM_MICRO_BATCHES: a batch is accumulated over these",
    "gradient_handler": "leave it out: replicas and tied weights are reduced by themselves",
    "clip_grad_norm": "give it to the optimizer: grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)",
}
#: The least similarity of a misspelt name, at most 1: NUM_BATCHES, at 0.79, is a program's own.
_LEAST_SIMILARITY = 0.8
#: ColossalAI's default.
DEFAULT_SEED = 1024


class Config(dict[str, Any]):
    """A configuration whose entries can be read as attributes: ``config.BATCH_SIZE``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @classmethod
    def read(cls, source: ConfigSource) -> Config:
        """Reads a configuration and checks the entries that fleetpipe uses.

        Args:
            source: A mapping, or the path of a Python file that assigns the entries.

        Raises:
            ConfigError: An entry has a value that cannot be used.
            UsageError: ``source`` is neither a mapping nor a path.
        """
        if isinstance(source, (str, os.PathLike)):
            source = runpy.run_path(os.fspath(source))
        if not isinstance(source, Mapping):
            raise UsageError(
                "a configuration is a mapping or the path of a Python file",
                got=repr(source),
                fix="config=dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2))",
            )
        config = cls(source)
        _refuse_misspelt(config, (*_USED_ENTRIES, *_REFUSED_ENTRIES), "the configuration")
        _refuse_misspelt(config.get("parallel") or {}, ("pipeline", "tensor", "data"), "parallel")
        refused = {name: (config.get(name), fix) for name, fix in _REFUSED_ENTRIES.items()}
        tensor = config.degree("tensor")
        fix = "use mp_degree of fleetpipe.fleet, with its tensor-parallel layers"
        refused["parallel['tensor']"] = (tensor if tensor > 1 else None, fix)
        for name, (value, fix) in refused.items():
            if value:
                raise ConfigError(f"{name} is not configured here", got=str(value), fix=fix)
        for name in ("NUM_MICRO_BATCHES", "NUM_CHUNKS"):
            require_whole(name, config.get(name, 1))
        return config

    def degree(self, axis: str) -> int:
        """Returns the number of ranks along an axis, by the entry ``parallel``; 1 without one.

        Args:
            axis: ``"pipeline"``, ``"tensor"`` or ``"data"``; its entry is a number, or a mapping
                with a ``size``.
        """
        value = (self.get("parallel") or {}).get(axis, 1)
        size = value.get("size", 1) if isinstance(value, Mapping) else value
        return require_whole(f"parallel[{axis!r}]", size)


def _refuse_misspelt(names: Iterable[str], entries: Iterable[str], where: str) -> None:
    """Raises ConfigError for a name that resembles a valid entry, and so may be misspelt.

    Args:
        names: The names in a configuration.
        entries: The names of the valid entries.
        where: What the names are in, for the message.
    """
    for name in names:
        for entry in difflib.get_close_matches(str(name), entries, 1, _LEAST_SIMILARITY):
            if entry != name:
                raise ConfigError(
                    f"{where} has no entry {name!r}", fix=f"did you mean {entry!r}? else rename it"
                )


class ParallelMode(enum.Enum):
    """The kinds of groups to which a rank belongs."""

    GLOBAL = "global"
    DATA = "data"
    PIPELINE = "pipe"


class GlobalContext:
    """Gives a program its configuration and this process's ranks; ``gpc`` is the only object.

    A process that runs all ranks of a pipeline is both the first rank and the last.
    """

    def __init__(self) -> None:
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        """The configuration that ``launch_from_torch`` was given.

        Raises:
            StateError: ``launch_from_torch`` was not called.
        """
        if self._config is None:
            raise StateError(
                "the program was not launched",
                fix="call launch_from_torch(config=dict(parallel=dict(pipeline=2), ..)) first",
            )
        return self._config

    @property
    def configured_chunks(self) -> int | None:
        """``NUM_CHUNKS`` of the configuration; None without it or without a configuration."""
        return None if self._config is None else self._config.get("NUM_CHUNKS")

    def load_config(self, config: Config) -> None:
        """Sets the configuration of the job."""
        self._config = config

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of ranks of a pipeline."""
        return self.get_world_size(ParallelMode.PIPELINE)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the pipeline."""
        return self.get_world_size(ParallelMode.DATA)

    def get_world_size(self, mode: ParallelMode) -> int:
        """Returns the number of ranks in this process's group of a kind.

        Raises:
            StateError: The program was not launched.
        """
        degrees = self._require_job().degrees
        sizes = {ParallelMode.DATA: degrees.dp, ParallelMode.PIPELINE: degrees.pp}
        return sizes.get(mode, degrees.dp * degrees.pp)

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Returns this process's rank in its group of a kind; 0 if it runs all ranks.

        Raises:
            StateError: The program was not launched.
        """
        topology = self._require_job().hcg
        ranks = {
            ParallelMode.GLOBAL: topology.get_global_rank,
            ParallelMode.DATA: topology.get_data_parallel_rank,
            ParallelMode.PIPELINE: topology.get_stage_id,
        }
        return int(ranks[mode]())

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Returns whether this process is the first of its group of a kind."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Returns whether this process is the last of its group of a kind, or runs all ranks."""
        played = self._require_job().local and mode is not ParallelMode.DATA
        return played or self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def destroy(self) -> None:
        """Ends the job, as ``fleet.shutdown`` does, and forgets the configuration.

        Raises:
            PeerFailed: Another rank has failed.
            PipelineTimeout: Another rank did not take what was sent to it within the limit.
        """
        self._config = None
        fleet.shutdown()

    def _require_job(self) -> Job:
        fix = "call launch_from_torch(config=..) first"
        return required_job("there is no job yet, or it has ended", fix=fix)


#: ColossalAI's ``global_context``, which its programs call ``gpc``.
gpc = GlobalContext()


def get_default_parser() -> argparse.ArgumentParser:
    """Returns a parser with ColossalAI's options ``--config`` and ``--backend``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="path of the configuration")
    parser.add_argument("--backend", default="gloo", help="accepted without effect")
    return parser


def launch_from_torch(
    config: ConfigSource, backend: str = "gloo", seed: int = DEFAULT_SEED, verbose: bool = True
) -> None:
    """Begins the job. Collective over all processes that the launcher started.

    Ranks and addresses are those of ``paddle.distributed.launch`` (``fleetpipe run --nproc``); a
    process that no launcher started runs all ranks of the pipeline itself. All processes that the
    pipeline does not need are its replicas.

    Args:
        config: A mapping, or the path of a Python file that assigns ``NUM_MICRO_BATCHES`` (the
            number of micro-batches of a batch), ``parallel = dict(pipeline=2)``, and if wanted
            ``NUM_CHUNKS`` and ``SCHEDULE`` (a schedule of fleetpipe by name). ``TENSOR_SHAPE`` has
            no effect: messages contain their shapes. ``gpc.config`` has these and all other
            entries.
        backend: Accepted without effect.
        seed: Seeds Python's, NumPy's and Paddle's generators.
        verbose: Whether rank 0 logs how many ranks and replicas there are.

    Raises:
        ConfigError: An entry has a value that cannot be used, the ranks do not fit the number of
            processes, or torchrun or mpirun started these.
        UsageError: ``config`` is neither a mapping nor a path.
        PipelineTimeout: Some rank did not arrive within the limit.
    """
    read = Config.read(config)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": -1, "pp_degree": read.degree("pipeline")}
    strategy.pipeline_configs = {
        "accumulate_steps": read.get("NUM_MICRO_BATCHES", 1),
        "schedule_mode": read.get("SCHEDULE", "1F1B"),
    }
    fleet.init(is_collective=True, strategy=strategy)
    gpc.load_config(read)
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)
    if verbose:
        sizes = f"{gpc.pipeline_parallel_size} pipeline ranks, {gpc.data_parallel_size} replicas"
        get_dist_logger().info(sizes, ranks=[0])


def initialize(
    model: PipelineLayer,
    optimizer: Optimizer,
    criterion: Callable[[Nest, Nest], Tensor],
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: Scheduler = None,
    verbose: bool = True,
) -> tuple[Engine, Iterable[Any] | None, Iterable[Any] | None, Scheduler]:
    """Wraps a model and its optimizer in an engine. Collective over the job.

    Args:
        model: The result of ``PipelinableContext.partition``, or a ``PipelineLayer``.
        optimizer: A Paddle optimizer on ``model.parameters()``.
        criterion: ``criterion(output, label)`` gives a Tensor with one element.
        train_dataloader: Returned as it is. Each rank of a pipeline reads the same batches.
        test_dataloader: Returned as it is.
        lr_scheduler: Returned as it is; the program steps it.
        verbose: Whether rank 0 prints the configuration.

    Returns:
        The engine, the two loaders and the scheduler.

    Raises:
        ConfigError: The model or the optimizer does not fit the job.
        StateError: ``launch_from_torch`` was not called.
        UsageError: ``model`` is no PipelineLayer.
        PipelineTimeout: Some rank did not arrive within the limit.
    """
    config = gpc.config
    if not isinstance(model, PipelineLayer):
        raise UsageError(
            "initialize takes the stages of a model",
            expected="what PipelinableContext.partition returned",
            got=type(model).__name__,
            fix="model = pipelinable.partition(num_chunks, gpc.pipeline_parallel_size, "
            "gpc.get_local_rank(ParallelMode.PIPELINE))",
        )
    if verbose:
        get_dist_logger().info(f"configuration: {dict(config)}", ranks=[0])
    loss = RecordedLoss(criterion)
    model.take_loss(loss)
    engine = Engine(fleet.distributed_model(model), fleet.distributed_optimizer(optimizer), loss)
    return engine, train_dataloader, test_dataloader, lr_scheduler


class RecordedLoss(paddle.nn.Layer):
    """The user's loss, which records outputs and labels within :meth:`recording`.

    Attributes:
        criterion: The user's loss.
    """

    def __init__(self, criterion: Callable[[Nest, Nest], Tensor]) -> None:
        super().__init__()
        self.criterion = criterion
        self._recorded: list[tuple[Nest, Nest]] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Nest, Nest]]]:
        """In this context, each micro-batch's output and label are appended to the yielded list."""
        recorded: list[tuple[Nest, Nest]] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def forward(self, output: Nest, label: Nest) -> Tensor:
        """Returns the loss of a micro-batch."""
        if self._recorded is not None:
            self._recorded.append((map_tensors(lambda tensor: tensor.detach(), output), label))
        return self.criterion(output, label)


class Engine:
    """Runs batches of a pipeline; ``initialize`` returns it.

    Attributes:
        model: The wrapped model.
        optimizer: The wrapped optimizer.
        loss: The loss.
        training: True after :meth:`train`, False after :meth:`eval`.
    """

    def __init__(
        self, model: PipelineParallel, optimizer: PipelineOptimizer, loss: RecordedLoss
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.training = True
        self._has_gradients = False

    def train(self) -> None:
        """Makes later batches train."""
        self.training = True
        self.model.train()

    def eval(self) -> None:
        """Makes later batches leave parameters, running statistics and gradients unchanged."""
        self.training = False
        self.model.eval()

    def zero_grad(self) -> None:
        """Clears the gradients, before each batch that trains."""
        self.optimizer.clear_grad()
        self._has_gradients = False

    def step(self) -> None:
        """Updates the parameters from the gradients that :meth:`execute_schedule` left.

        Collective over the job.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        self.optimizer.step()

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Nest, Nest, Nest]:
        """Runs one batch through all stages: forward and backward, or forward alone. Collective.

        Args:
            data_iter: An iterator whose next item is the batch, ``(inputs, labels)``. Every rank of
                a pipeline takes the same.
            forward_only: Whether to leave out backward; after :meth:`eval` only.
            return_loss: Whether to compute the loss.
            return_output_label: Whether to return outputs and labels.

        Returns:
            The output of the whole batch and its labels, on the owner of the last stage (None
            elsewhere), and the loss, on every rank: the mean over the micro-batches. Values that
            the options leave out are None.

        Raises:
            ConfigError: NUM_MICRO_BATCHES does not divide the rows of a batch that trains.
            StateError: The engine is in the other mode, or the gradients of the batch before were
                not cleared.
            UsageError: ``data_iter`` has ended, or its item is no batch.
        """
        self._require_mode(forward_only, return_loss)
        batch = next(data_iter, None)
        if not isinstance(batch, Sequence) or len(batch) != 2:
            raise UsageError(
                "each item of data_iter is a batch (inputs, labels)",
                got="no item: it has ended" if batch is None else type(batch).__name__,
                fix="data_iter = iter(train_dataloader) for each epoch, of a dataset of pairs",
            )
        self.model.micro_batch_size = self._rows_of_micro_batch(batch, exact=not forward_only)
        data = list(batch)
        if not return_loss:
            outputs, loss = self.model.eval_batch(data), None
        else:
            with self.loss.recording() as recorded:
                if forward_only:
                    loss = self.model.eval_batch(data, compute_loss=True)
                else:
                    self.model._prepare_training(data, self.optimizer)
                    self._has_gradients = True
                    loss = self.model.forward_backward_pipeline(data)
            outputs = [output for output, _ in recorded]
        if not return_output_label or not self.model.is_pipeline_last_stage():
            return None, None, loss
        return join_outputs(outputs), batch[1], loss

    def _require_mode(self, forward_only: bool, return_loss: bool) -> None:
        """Checks that a batch may run with these arguments of :meth:`execute_schedule` now.

        Raises:
            ConfigError: A batch that trains would have no loss.
            StateError: The engine is in the other mode, or has gradients of the batch before.
        """
        if not forward_only and not return_loss:
            raise ConfigError(
                "a batch that trains has a loss",
                got="return_loss=False and forward_only=False",
                fix="leave return_loss out, or set forward_only=True",
            )
        if forward_only == self.training:
            raise StateError(
                "forward_only=True evaluates, and the engine is set to train"
                if forward_only
                else "the engine is set to evaluate, and the batch would train",
                fix="call engine.eval() first" if forward_only else "call engine.train() first",
            )
        if not forward_only and self._has_gradients:
            raise StateError(
                "the gradients of the batch before are still there",
                cause="they have been reduced over the ranks, and would be once more",
                fix="call engine.zero_grad() before each batch that trains; raise "
                "NUM_MICRO_BATCHES to accumulate more",
            )

    def _rows_of_micro_batch(self, batch: Nest, exact: bool) -> int:
        """Returns the rows of each micro-batch of a batch, rounded up.

        Args:
            batch: The batch.
            exact: Whether the number of micro-batches must divide the rows.

        Raises:
            ConfigError: ``exact`` is True, and the number does not divide the rows.
        """
        count = self.model.accumulate_steps
        rows = next((t.shape[0] for t in tensors_of(batch) if t.ndim), 0)
        if exact and rows % count:
            raise ConfigError(
                f"NUM_MICRO_BATCHES (={count}) does not divide the {rows} rows of the batch",
                fix="drop an incomplete last batch, or choose another batch size",
            )
        return max(1, -(-rows // count))

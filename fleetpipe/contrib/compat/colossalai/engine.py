"""``initialize`` and its engine, which runs a batch in the steps of ColossalAI's programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from fleetpipe import fleet
from fleetpipe.aliases import Layer, Nest, Optimizer, Scheduler, Tensor
from fleetpipe.contrib.compat.colossalai.context import gpc
from fleetpipe.contrib.compat.colossalai.logging import get_dist_logger
from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.batch.outputs import join_outputs
from fleetpipe.dygraph.nest import map_tensors, outline, tensors_of
from fleetpipe.engine.observer import Blocked, Instruction, Played, message_of
from fleetpipe.errors import BoundaryError, ConfigError, StateError, UsageError
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Op, Send

#: What ``execute_schedule`` returns: output, label, loss.
Executed = tuple[Nest, Nest, Nest]


def initialize(
    model: PipelineLayer,
    optimizer: Optimizer,
    criterion: Callable[[Nest, Nest], Tensor] | None = None,
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
    loss = None if criterion is None else RecordedLoss(criterion)
    model.take_loss(loss)
    wrapped = fleet.distributed_model(model)
    if config.tensor_shape is not None:
        wrapped.observe(ShapedSends(config.tensor_shape, wrapped))
    engine = Engine(wrapped, fleet.distributed_optimizer(optimizer), loss)
    return engine, train_dataloader, test_dataloader, lr_scheduler


class RecordedLoss(paddle.nn.Layer):
    """A loss that keeps the outputs of micro-batches while :meth:`recording` is open.

    Attributes:
        criterion: The user's loss.
    """

    def __init__(self, criterion: Callable[[Nest, Nest], Tensor]) -> None:
        super().__init__()
        self.criterion = criterion
        self._outputs: list[Nest] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Nest]]:
        """While it is open, the outputs of the micro-batches are kept, in their order."""
        self._outputs = []
        try:
            yield self._outputs
        finally:
            self._outputs = None

    def forward(self, output: Nest, label: Nest) -> Tensor:
        """Returns the loss of a micro-batch."""
        if self._outputs is not None:
            self._outputs.append(map_tensors(lambda tensor: tensor.detach(), output))
        return self.criterion(output, label)


class Engine:
    """Runs batches; ``initialize`` returns it.

    Attributes:
        model: The wrapped model.
        optimizer: The wrapped optimizer.
        training: True after :meth:`train`, False after :meth:`eval`.
    """

    def __init__(
        self, model: PipelineParallel, optimizer: PipelineOptimizer, loss: RecordedLoss | None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.training = True
        self._loss = loss
        self._has_gradients = False

    @property
    def criterion(self) -> Callable[[Nest, Nest], Tensor] | None:
        """The user's loss; None without one."""
        return None if self._loss is None else self._loss.criterion

    def train(self) -> None:
        """Makes later batches train."""
        self.training = True
        self.model.train()

    def eval(self) -> None:
        """Makes later batches leave parameters, running statistics and gradients unchanged."""
        self.training = False
        self.model.eval()

    def take_back(self) -> None:
        """Gives the model the engine's loss back, and makes later batches train."""
        self.model.layers.take_loss(self._loss)
        self.zero_grad()
        self.train()

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
    ) -> Executed:
        """Runs one batch through all stages: forward and backward, or forward alone. Collective.

        Args:
            data_iter: An iterator whose next item is the batch: ``(inputs, labels)``, or a dict of
                the labels, under ``"label"``, and of named arguments of the layers. Every rank of a
                pipeline takes the same.
            forward_only: Whether to leave out backward; after :meth:`eval` only.
            return_loss: Whether to compute the loss.
            return_output_label: Whether to return outputs and labels.

        Returns:
            The output of the whole batch and its labels, on the owner of the last stage (None
            elsewhere), and the loss, on every rank: the mean over the micro-batches. Values that
            the options leave out are None.

        Raises:
            ConfigError: NUM_MICRO_BATCHES does not divide the rows of a batch that trains, or
                there is no loss.
            StateError: The engine is in the other mode, or the gradients of the batch before were
                not cleared.
            UsageError: ``data_iter`` is no iterator, has ended, or its item is no batch.
        """
        self._require_mode(forward_only, return_loss)
        inputs, label = _batch(data_iter)
        self.model.micro_batch_size = self._rows(inputs, label, exact=not forward_only)
        if not return_loss:
            outputs, loss = self.model.eval_batch([inputs, label]), None
        else:
            with self._recording(return_output_label) as outputs:
                loss = self._loss_of([inputs, label], forward_only)
        if not return_output_label or not self.model.is_pipeline_last_stage():
            return None, None, loss
        return join_outputs(outputs), label, loss

    def _recording(self, wanted: bool) -> AbstractContextManager[list[Nest]]:
        if self._loss is None or not wanted:
            return nullcontext([])
        return self._loss.recording()

    def _loss_of(self, data: list[Nest], forward_only: bool) -> Nest:
        """Runs a batch, and returns its loss."""
        if forward_only:
            return self.model.eval_batch(data, compute_loss=True)
        self.model._prepare_training(data, self.optimizer)
        self._has_gradients = True
        return self.model.forward_backward_pipeline(data)

    def _require_mode(self, forward_only: bool, return_loss: bool) -> None:
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

    def _rows(self, inputs: Nest, label: Nest, exact: bool) -> int:
        """Returns the rows of a micro-batch."""
        count = self.model.accumulate_steps
        rows = next((t.shape[0] for t in tensors_of((inputs, label)) if t.ndim), 0)
        if exact and rows % count:
            raise ConfigError(
                f"NUM_MICRO_BATCHES (={count}) does not divide the {rows} rows of the batch",
                fix="drop an incomplete last batch, or choose another batch size",
            )
        return max(1, -(-rows // count))


def _batch(data_iter: Iterator[Any]) -> tuple[Nest, Nest]:
    """Takes the next batch; returns its inputs and its labels."""
    if not hasattr(type(data_iter), "__next__"):
        raise UsageError(
            "execute_schedule takes an iterator of batches",
            got=type(data_iter).__name__,
            fix="data_iter = iter(train_dataloader)",
        )
    try:
        batch = next(data_iter)
    except StopIteration:
        raise UsageError(
            "the iterator of batches has ended",
            fix="make a new one for each epoch: data_iter = iter(train_dataloader)",
        ) from None
    if isinstance(batch, dict):
        return {key: value for key, value in batch.items() if key != "label"}, batch.get("label")
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise UsageError(
            "a batch is (inputs, labels), or a dict with an entry 'label'",
            got=f"{type(batch).__name__} of {len(batch)}"
            if isinstance(batch, Sequence)
            else type(batch).__name__,
            fix="have the dataset return a pair",
        )
    inputs, label = batch
    return inputs, label


class ShapedSends:
    """Checks the shape of the values that forwards send to other stages.

    Every message tells its shape, so that knowing it before saves nothing; but another shape is an
    error. Only an evaluation may have fewer rows, in its last batch.
    """

    def __init__(self, shape: Sequence[int], model: Layer) -> None:
        self._shape = tuple(shape)
        self._model = model

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`.

        The instruction that it returns raises :class:`BoundaryError` if a value has another shape.
        """
        if not isinstance(op, Send) or op.kind != "F":
            return instruction
        key = message_of(op)

        def check() -> Blocked | None:
            value = played.values[key]
            if not all(self._fits(tuple(tensor.shape)) for tensor in tensors_of(value)):
                raise BoundaryError(
                    "a value between stages does not have the shape of TENSOR_SHAPE",
                    where=f"rank {played.rank}, stage {key.source}, micro-batch {key.micro_batch}",
                    expected=str(list(self._shape)),
                    got=outline(value),
                    fix="leave TENSOR_SHAPE out: messages tell their shapes",
                )
            return instruction()

        return check

    def _fits(self, shape: tuple[int, ...]) -> bool:
        short = not self._model.training and shape[:1] < self._shape[:1]
        return shape == self._shape or (short and shape[1:] == self._shape[1:])

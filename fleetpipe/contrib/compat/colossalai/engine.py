"""``initialize`` and its engine, which runs a batch in the steps of ColossalAI's programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fleetpipe import fleet
from fleetpipe.aliases import Nest, Optimizer, Scheduler, Tensor
from fleetpipe.contrib.compat.colossalai.context import gpc
from fleetpipe.contrib.compat.colossalai.logging import get_dist_logger
from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.batch.outputs import join_outputs
from fleetpipe.dygraph.nest import map_tensors, tensors_of
from fleetpipe.errors import ConfigError, StateError, UsageError
from fleetpipe.paddle_api import paddle


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
    """A loss that records outputs and labels of micro-batches while :meth:`recording` is open.

    Attributes:
        criterion: The user's loss.
    """

    def __init__(self, criterion: Callable[[Nest, Nest], Tensor]) -> None:
        super().__init__()
        self.criterion = criterion
        self._recorded: list[tuple[Nest, Nest]] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Nest, Nest]]]:
        """While it is open, its list has each micro-batch's output and label, in their order."""
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
    """Runs batches; ``initialize`` returns it.

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
        self.model.micro_batch_size = self._rows(batch, exact=not forward_only)
        if not return_loss:
            outputs, loss = self.model.eval_batch(list(batch)), None
        else:
            with self.loss.recording() as recorded:
                loss = self._loss_of(list(batch), forward_only)
            outputs = [output for output, _ in recorded]
        if not return_output_label or not self.model.is_pipeline_last_stage():
            return None, None, loss
        return join_outputs(outputs), batch[1], loss

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

    def _rows(self, batch: Nest, exact: bool) -> int:
        """Returns the rows of a micro-batch."""
        count = self.model.accumulate_steps
        rows = next((t.shape[0] for t in tensors_of(batch) if t.ndim), 0)
        if exact and rows % count:
            raise ConfigError(
                f"NUM_MICRO_BATCHES (={count}) does not divide the {rows} rows of the batch",
                fix="drop an incomplete last batch, or choose another batch size",
            )
        return max(1, -(-rows // count))

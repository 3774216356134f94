"""Defines ``fleetpipe.Model``, which trains a pipeline with the methods of ``paddle.Model``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetpipe import fleet
from fleetpipe.aliases import Nest
from fleetpipe.capture.cutting.split_spec import AUTO, SplitSpec
from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, PipelineParallel
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.fit import arguments, networks
from fleetpipe.fit.callbacks import progress, rank_policy
from fleetpipe.fit.callbacks.callback_list import build_callback_list
from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.loop import History, Logs, Loop
from fleetpipe.fit.micro_batches import Metric, Rows, as_list, batch_from_item, metric_names_of
from fleetpipe.fit.position import BatchSource, Position, make_batch_source
from fleetpipe.fit.runner import Runner, precision_from_configs
from fleetpipe.job import attempt_files
from fleetpipe.job.job import required_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_types import Data, FitCallbacks, Layer, Optimizer, Tensor
from fleetpipe.representation import shows

if TYPE_CHECKING:
    from paddle.hapi.model_summary import ModelSummary


@shows("mode", stages="network.placement.stages", loss="_criterion", optimizer="_optimizer")
class Model(paddle.Model):
    """Trains, evaluates and runs a pipeline with the methods of ``paddle.Model``.

    Every method that takes data is collective: each rank calls it, with the same arguments, and
    gets the same result.

    Attributes:
        network: The ``PipelineLayer``.
        stop_training: Callbacks set it; training ends with the epoch in which any rank set it.
        mode: ``"train"``, ``"eval"`` or ``"test"``.
    """

    def __init__(
        self,
        network: Layer,
        inputs: Nest = None,
        labels: Nest = None,
        split_spec: SplitSpec = AUTO,
        num_chunks: int = 1,
    ) -> None:
        """Makes a Model of a network; every rank does so alike, after ``fleet.init``.

        Args:
            network: A ``PipelineLayer``, wrapped or not, a list of layers, or any ``nn.Layer``,
                which is cut as by ``fleetpipe.pipeline``.
            inputs: An ``InputSpec`` for each column of the data that is an input, or a Tensor as in
                the first batch; None is one input of a list or an ``nn.Sequential``.
            labels: Ignored: it is in Paddle's signature, and columns after the inputs are labels.
            split_spec: Where to cut an ``nn.Layer``; see ``fleetpipe.pipeline``.
            num_chunks: The number of chunks on each rank into which an ``nn.Layer`` is cut.

        Raises:
            StateError: ``fleet.init`` was not called.
            ConfigError: The network is no pipeline, or needs inputs to become one.
            CaptureError: An ``nn.Layer`` cannot be cut.
        """
        # Paddle's own constructor is not called: it would wrap the network for data parallelism.
        self._job = required_job("a Model is made after fleet.init")
        self._input_specs = as_list(inputs)
        self.mode = "train"
        self.network: PipelineLayer = networks.pipeline_of(
            network, self._input_specs, self._job, split_spec, num_chunks
        )
        self._wrapped = network if isinstance(network, PipelineParallel) else None
        self.stop_training = False
        self._metrics: list[Metric] = []
        self._criterion: Callable[..., Nest] | None = None
        self._optimizer: Any = None
        self._runner: Runner | None = None

    def prepare(
        self,
        optimizer: Optimizer | None = None,
        loss: Callable[..., Nest] | None = None,
        metrics: Metric | Sequence[Metric] | None = None,
        amp_configs: str | dict[str, Any] | None = None,
    ) -> None:
        """Sets the optimizer, the loss, the metrics and the precision. Collective over the job.

        Args:
            optimizer: Any Paddle optimizer over ``parameters()``, wrapped or not; needed for
                training.
            loss: ``loss(*outputs, *labels)``, a layer or a function; needed for training.
            metrics: Objects of ``paddle.metric``, or others with the same methods.
            amp_configs: As in Paddle: a level, or a dict of options. On a CPU it has no effect.

        Raises:
            ConfigError: An argument does not fit a pipeline.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        arguments.require_prepared(optimizer, loss, as_list(metrics))
        self._metrics, self._criterion = as_list(metrics), loss
        # Callbacks get the user's own optimizer, whose learning rate they change.
        wrapped = optimizer if isinstance(optimizer, PipelineOptimizer) else None
        self._optimizer = optimizer if wrapped is None else wrapped.wrapped
        precision = precision_from_configs(amp_configs, self.network, self._optimizer)
        if optimizer is not None and wrapped is None:
            wrapped = fleet.distributed_optimizer(optimizer)
        if self._wrapped is None:
            self._wrapped = fleet.distributed_model(self.network)
        self._runner = Runner(self._wrapped, self._job, loss, self._metrics, wrapped, precision)

    @property
    def pipeline(self) -> PipelineParallel:
        """The wrapped network, which has the schedule, the trace and the profile.

        Raises:
            StateError: :meth:`prepare` was not called.
        """
        return self._require_runner().pipeline

    def computing(self) -> AbstractContextManager[None]:
        """Returns a context in which operations compute in the precision of :meth:`prepare`."""
        return self._require_runner().precision.computing()

    @property
    def optimizer(self) -> PipelineOptimizer | None:
        """The wrapped optimizer of :meth:`prepare`; None if it got none."""
        return self._require_runner().optimizer

    @property
    def metric_names(self) -> list[str]:
        """The names of the numbers in logs: the loss, and each value of the metrics."""
        return [*(["loss"] if self._criterion is not None else []), *metric_names_of(self._metrics)]

    @property
    def micro_batch_losses(self) -> list[float]:
        """What each micro-batch added to the last training loss, averaged over the replicas."""
        return self._require_runner().shares

    @property
    def global_step(self) -> int:
        """The number of batches trained so far, in all epochs together."""
        return self._require_runner().trained

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the optimizer."""
        return float(self._optimizer.get_lr())

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None if it was not computed."""
        optimizer = self.optimizer
        return None if optimizer is None else optimizer.gradient_norm

    def is_rank(self, place: str) -> bool:
        """Returns whether this process is the rank of the job that ``place`` names.

        Args:
            place: ``"first"`` for the first rank of the job, whose output the launcher shows;
                ``"loss"`` for the owner of the last stage in the first replica.
        """
        if place == "first":
            return self._job.leads()
        last = self.pipeline.is_pipeline_last_stage(ignore_virtual=True)
        return self._job.leads("pp") and last

    def gather(self, value: Nest) -> list[Nest]:
        """Returns on every rank the values that all ranks of the job pass, by rank. Collective.

        Args:
            value: Tensors and plain values in tuples, lists and dicts.
        """
        gather = self._job.everyone().all_gather
        return list(self._job.exchange("gathering what a callback passes", lambda: gather(value)))

    def train_batch(self, inputs: Nest, labels: Nest = None, update: bool = True) -> Nest:
        """Trains on one batch of this replica, of any number of rows.

        Args:
            inputs: A Tensor or an array, or a list of them.
            labels: The labels, in the same form.
            update: Must be True: a pipeline steps once for each batch.

        Returns:
            ``[loss]``, an array; with metrics the pair ``([loss], values)``.

        Raises:
            ConfigError: There is no optimizer or loss, or the batch does not fit.
        """
        if not update:
            raise ConfigError(
                "a pipeline adds up gradients over the micro-batches of one batch",
                got="update=False",
                fix="raise accumulate_steps in strategy.pipeline_configs, or pass "
                "accumulate_grad_batches to fit",
            )
        (loss,) = self._runner_for_training().train([self._rows_of_batch(inputs, labels)])
        return self._paddle_result(loss)

    def eval_batch(self, inputs: Nest, labels: Nest = None) -> Nest:
        """Evaluates one batch; arguments and result are as for :meth:`train_batch`."""
        self.mode = "eval"
        return self._paddle_result(
            self._require_runner().evaluate(self._rows_of_batch(inputs, labels))[0]
        )

    def predict_batch(self, inputs: Nest) -> list[np.ndarray]:
        """Returns the outputs for one batch of every replica, each an array [rows, ..]."""
        self.mode = "test"
        return self._require_runner().predict(self._rows_of_batch(inputs, None))

    def fit(  # type: ignore[override]  # Paddle's returns None
        self,
        train_data: Data = None,
        eval_data: Data = None,
        batch_size: int | Sequence[int] = 1,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | None = None,
        save_freq: int = 1,
        verbose: int = 2,
        drop_last: bool = False,
        shuffle: bool = True,
        num_workers: int = 0,
        callbacks: FitCallbacks = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
        save_steps: int | None = None,
        resume: str | None = None,
        state: dict[str, Any] | None = None,
    ) -> History:
        """Trains for some epochs. Collective over the job.

        With ``save_steps``, ``resume`` or a ``PipelineCheckpoint`` among the callbacks, and under
        ``fleetpipe launch``, checkpoints are saved: a training that resumes from one, also in the
        middle of an epoch, has the bits of one that was not interrupted. Data that are neither a
        ``Dataset`` nor a ``fleetpipe.io.DataLoader`` must yield the same batches again for that.

        Args:
            train_data: A ``Dataset``, of which each replica reads a part, or anything that yields
                batches of this replica: a ``DataLoader``, a list.
            eval_data: The data to evaluate at the end of epochs, in a form of ``train_data``.
            batch_size: Rows of a batch of one replica, if the data is a ``Dataset``; a pair for
                training and evaluation.
            epochs: Passes over the training data.
            eval_freq: Epochs from one evaluation to the next; the first epoch has one.
            log_freq: Batches from one line of the log to the next.
            save_dir: The folder for ``<epoch>.pdparams`` and ``<epoch>.pdopt``, or for checkpoints
                instead; None writes none.
            save_freq: Epochs from one save to the next.
            verbose: 0 shows nothing; 1 a bar, or a line every ten seconds if standard error is no
                terminal; 2 lines.
            drop_last: Whether a short last batch is left out.
            shuffle: Whether the order of a ``Dataset`` changes from epoch to epoch.
            num_workers: Processes that load a ``Dataset``.
            callbacks: ``paddle.callbacks.Callback`` s, which run on every rank; and ``"wandb"``,
                ``"mlflow"`` or ``"tensorboard"`` for a ``MetricsLogger`` with that format.
            accumulate_grad_batches: Batches whose gradients are added up for one step.
            num_iters: The most batches in all epochs together, evaluations included, as in Paddle.
                If the limit is reached within a step, that step is not made.
            save_steps: Batches from one checkpoint to the next within an epoch.
            resume: ``"auto"`` resumes from the newest checkpoint, if there is one; None does so
                under ``fleetpipe launch``, in the first training of the model.
            state: The script's own state for checkpoints, as for :func:`fleetpipe.resume`.

        Returns:
            Lists by name, the same on every rank, with a number for each epoch that this call
            trained: ``"loss"``, the mean over all rows, and the metrics; those of evaluations as
            ``"eval_loss"`` and so on.

        Raises:
            ConfigError: There is no optimizer or loss, or the data does not fit; or the folder has
                the checkpoints of another training.
            CheckpointError: A checkpoint cannot be saved, is damaged, or does not fit.
            SystemExit: The job was asked to stop, and has saved; see ``fleetpipe.resume``.
        """
        runner = self._runner_for_training()
        if resume not in (None, "auto"):
            raise ConfigError(
                "resume is 'auto' or None", got=repr(resume), fix='pass resume="auto" to go on'
            )
        resumes = resume == "auto" or (attempt_files.number() > 0 and runner.trained == 0)
        arguments.require_numbers(
            epochs=epochs,
            eval_freq=eval_freq,
            save_freq=save_freq,
            accumulate_grad_batches=accumulate_grad_batches,
            num_iters=num_iters,
        )
        if accumulate_grad_batches != 1 and self.pipeline.trace is not None:
            raise ConfigError(
                "a trace counts the actions of steps that are all of one length",
                got=f"accumulate_grad_batches={accumulate_grad_batches}",
                fix="raise accumulate_steps in strategy.pipeline_configs, and batch_size with it; "
                'or leave "trace" out of fleetpipe_configs',
            )
        train_size, eval_size = arguments.batch_sizes_of(batch_size)
        source = self._batch_source(
            train_data, train_size, shuffle=shuffle, drop_last=drop_last, workers=num_workers
        )
        evaluation = (
            None
            if eval_data is None
            else self._batch_source(eval_data, eval_size, workers=num_workers)
        )
        steps = source.steps
        if num_iters is not None and steps is not None:
            epochs, steps = -(-num_iters // steps), min(num_iters, steps)
        if resumes or save_steps is not None:
            callbacks = [callback for callback in as_list(callbacks) if callback]
            if not any(isinstance(callback, PipelineCheckpoint) for callback in callbacks):
                callbacks.append(PipelineCheckpoint(None, save_steps, save_freq))
        callback_list = build_callback_list(
            self,
            callbacks,
            epochs=epochs,
            steps=steps,
            log_freq=log_freq,
            save_freq=save_freq,
            save_dir=save_dir,
            verbose=verbose,
        )

        position = Position(runner, source, callback_list.callbacks)
        savers = [one for one in callback_list.callbacks if isinstance(one, PipelineCheckpoint)]
        saving: AbstractContextManager[PipelineCheckpoint | None] = nullcontext()
        if savers:
            saving = savers[0].saving(position, save_dir, resumes, state)
        with progress.closing_bars(callback_list.callbacks), saving as saver:
            left = None if num_iters is None else max(0, num_iters - position.taken)
            done, total = runner.trained, None
            if source.steps is not None:
                ahead = (epochs - position.epoch) * source.steps - position.step
                ahead = ahead if left is None else min(ahead, left)
                total = (done + ahead) // accumulate_grad_batches
            self._job.progress.expect(done // accumulate_grad_batches, total)
            ends_at_once = position.epoch >= epochs or left == 0
            if resumes and ends_at_once and self.is_rank("first"):
                by_epochs = position.epoch >= epochs
                trained = f"all {epochs} epochs" if by_epochs else f"num_iters={num_iters} batches"
                rank_policy.say(f"{trained} are trained: nothing is left to do")
            return Loop(self, runner, callback_list, left).train(
                source,
                position,
                saver,
                epochs=epochs,
                accumulate=accumulate_grad_batches,
                evaluation=evaluation,
                eval_freq=eval_freq,
            )

    def evaluate(
        self,
        eval_data: Data,
        batch_size: int = 1,
        log_freq: int = 10,
        verbose: int = 2,
        num_workers: int = 0,
        callbacks: FitCallbacks = None,
        num_iters: int | None = None,
    ) -> Logs:
        """Returns the mean loss of all rows and the metrics, by name. Collective.

        ``paddle.Model`` returns the loss of the last batch instead.

        Args:
            eval_data: As for :meth:`fit`.
            batch_size: Rows of a batch of one replica.
            log_freq: Batches from one line of the log to the next.
            verbose: As for :meth:`fit`.
            num_workers: Processes that load a ``Dataset``.
            callbacks: As for :meth:`fit`.
            num_iters: Most batches to evaluate.
        """
        source = self._batch_source(eval_data, batch_size, workers=num_workers)
        callback_list = build_callback_list(self, callbacks, log_freq=log_freq, verbose=verbose)
        with progress.closing_bars(callback_list.callbacks):
            logs = Loop(self, self._require_runner(), callback_list, num_iters).evaluate(source)
        return {name: value for name, value in logs.items() if name in self.metric_names}

    def predict(
        self,
        test_data: Data,
        batch_size: int = 1,
        num_workers: int = 0,
        stack_outputs: bool = False,
        verbose: int = 1,
        callbacks: FitCallbacks = None,
    ) -> list[Nest]:
        """Returns the model's outputs for all data, on every rank. Collective.

        Args:
            test_data: As for :meth:`fit`; columns after the inputs are ignored.
            batch_size: Rows of a batch of one replica.
            num_workers: Processes that load a ``Dataset``.
            stack_outputs: Whether the arrays of all batches are joined.
            verbose: As for :meth:`fit`.
            callbacks: As for :meth:`fit`.

        Returns:
            For each output of the model its arrays, batch by batch, in the order of the data.
        """
        source = self._batch_source(test_data, batch_size, workers=num_workers)
        callback_list = build_callback_list(self, callbacks, verbose=verbose)
        with progress.closing_bars(callback_list.callbacks):
            batches = Loop(self, self._require_runner(), callback_list).predict(source)
        outputs = [list(arrays) for arrays in zip(*batches)]
        return [np.concatenate(arrays) for arrays in outputs] if stack_outputs else outputs

    def save(self, path: str, training: bool = True) -> None:
        """Writes the whole model in the files of ``paddle.Model``. Collective.

        The first rank of the job writes ``path.pdparams`` and, with an optimizer, ``path.pdopt``.
        ``paddle.Model`` can load them, and :meth:`load` under any layout.

        Args:
            path: The path of the files without their endings; missing folders are made.
            training: False writes files that ``paddle.jit.load`` and ``paddle.inference`` read;
                this needs the ``inputs`` of the constructor.

        Raises:
            CheckpointError: A file cannot be written; every rank raises.
            ConfigError: ``training=False`` without a description of the inputs, or on ranks that
                share a plain model.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        runner = self._require_runner()
        if training:
            networks.save(self._job, path, runner.pipeline, runner.optimizer)
        else:
            networks.save_for_inference(self._job, path, runner.pipeline, self._input_specs)

    def load(self, path: str, skip_mismatch: bool = False, reset_optimizer: bool = False) -> None:
        """Loads files of :meth:`save`, of ``paddle.Model`` or of ``paddle.save``. Collective.

        Every rank reads them and takes its part, whatever the layout.

        Args:
            path: The path of the files without their endings.
            skip_mismatch: Whether parameters that the file lacks, or has in another shape, keep
                their values, with a warning; the optimizer then keeps its state too. If it is
                False, the file may have other names, in the order of the model.
            reset_optimizer: Whether ``path.pdopt`` is not read.

        Raises:
            CheckpointError: A file is missing or damaged, or does not fit.
        """
        runner = self._require_runner()
        fits = networks.load_parameters(path, self.network, skip_mismatch)
        if fits and not reset_optimizer and runner.optimizer is not None:
            networks.load_optimizer_state(path, runner.pipeline, runner.optimizer)

    def parameters(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Returns the parameters of this process's stages, for the optimizer."""
        return list(self.network.parameters(*args, **kwargs))

    def summary(
        self, input_size: Nest = None, dtype: Nest = None, batch: Nest = None
    ) -> ModelSummary:
        """Prints the stages on the first rank: layers, parameters, and with a batch the memory.

        Collective with a batch; without one a single rank may call it.

        Args:
            input_size: Ignored: it is in Paddle's signature, and ``batch`` has the shapes.
            dtype: Ignored, like ``input_size``.
            batch: ``(inputs, labels)`` of a batch, to measure how many bytes a forward of one
                micro-batch leaves allocated in each stage. It runs three times; parameters, random
                states and metrics are not changed.

        Returns:
            ``total_params`` (with buffers) and ``trainable_params`` of the whole model.
        """
        lines = self.network.stage_table().splitlines()
        lines[0] += "; parameters that are trained"
        if batch is not None:
            sizes = self._require_runner().measured_bytes(self._rows_of_batch(*batch))
            column = ["bytes of activations", *(f"{size:,.0f}" for size in (*sizes, sum(sizes)))]
            lines[1:] = [f"{line}  {cell:>20}" for line, cell in zip(lines[1:], column)]
        if self.is_rank("first"):
            rank_policy.say("\n".join(lines))
        total = sum(math.prod(slot.shape) for slot in self.network.state.slots())
        trainable = sum(layer.parameters for layer in self.network.counted_partition().layers)
        return {"total_params": total, "trainable_params": trainable}

    def _batch_source(self, data: Nest, batch_size: int, **options: Any) -> BatchSource:
        """Returns a source of batches for a user's data, made by :func:`make_batch_source`."""
        arguments.require_numbers(num_workers=options["workers"])
        pipeline = self.pipeline
        is_first = pipeline.is_pipeline_first_stage(ignore_virtual=True)
        loads = is_first or pipeline.is_pipeline_last_stage(ignore_virtual=True)
        inputs = len(self._input_specs) or 1
        return make_batch_source(data, batch_size, inputs, self._job, loads=loads, **options)

    def _rows_of_batch(self, inputs: Nest, labels: Nest) -> Rows:
        """Returns the inputs and labels that a user passes to ``train_batch`` as a batch."""
        columns = as_list(inputs)
        degrees = self._job.degrees
        item = [*columns, *as_list(labels)]
        return batch_from_item(item, len(columns), self._job.replica, degrees.replicas, None)

    def _paddle_result(self, loss: float) -> Nest:
        """Returns the loss of a batch, and the metrics, in the form of ``paddle.Model``."""
        losses = [] if self._criterion is None else [np.asarray(loss, "float32")]
        values = [metric.accumulate() for metric in self._metrics]
        return (losses, values) if values else losses

    def _require_runner(self) -> Runner:
        """Returns the runner; raises StateError before :meth:`prepare`."""
        if self._runner is None:
            raise StateError(
                "this Model is not prepared",
                fix="call model.prepare(optimizer, loss, metrics) before anything is run",
            )
        return self._runner

    def _runner_for_training(self) -> Runner:
        """Returns the runner, and sets the mode; raises ConfigError without optimizer or loss."""
        runner = self._require_runner()
        if self._optimizer is None or self._criterion is None:
            raise ConfigError(
                "training needs an optimizer and a loss",
                fix="call model.prepare(optimizer, loss, metrics)",
            )
        self.mode = "train"
        return runner

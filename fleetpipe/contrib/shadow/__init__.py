"""Trains the untouched model on the first batches of its pipeline too, and compares the two.

The comparison has the real data, loss, optimizer and clip, which the proof before it lacks. Each
rank runs the whole model and compares the stages that it owns. ``unshadowed.py`` finds reasons why
this is impossible. Start with ``Shadow``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from fleetpipe import log
from fleetpipe.aliases import Nest, Optimizer, Tensor
from fleetpipe.capture.proof.prove import (
    OUTSIDE_OF_PADDLE,
    find_first_differing_node,
    find_node_using,
)
from fleetpipe.capture.proof.training import State, moved_gradients
from fleetpipe.capture.running.captured_state import release, return_memory
from fleetpipe.capture.running.stages import PlainCopy
from fleetpipe.capture.running.variants import Marks, StagedCaptures, mark_attributes
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.capture.tracing.model_snapshot import losses_kept
from fleetpipe.compare.differences import (
    ROUNDING,
    Rounding,
    digest_of,
    largest_gap,
    largest_of,
    zeros_for_missing,
)
from fleetpipe.contrib.shadow.unshadowed import find_obstacle
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.dygraph.backward.layer_state import buffers_kept
from fleetpipe.dygraph.batch.micro_batches import MicroBatches, ObservedBatch
from fleetpipe.dygraph.function_code import is_of_library
from fleetpipe.dygraph.gradients import dense, drop_gradients, set_gradient
from fleetpipe.dygraph.nest import copy_tensors, tensors_of
from fleetpipe.dygraph.optimizer.clip_global import GlobalNormClip
from fleetpipe.engine.observer import BatchObserver
from fleetpipe.errors import CaptureError
from fleetpipe.job.job import all_ranks, current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import move_to_new_memory, set_data
from fleetpipe.paddle_api.layer import buffers_in, layer_at
from fleetpipe.paddle_api.optimizer import clips_of_a_step, optimized_parameters
from fleetpipe.paddle_api.tensor import has_memory, is_parameter
from fleetpipe.parity.beside import ReferenceTrainer, random_numbers_of_batch
from fleetpipe.parity.reference import Reference, compare_state, of_model
from fleetpipe.schedules.action import GlobalMicroBatch

_log = log.logger(__name__)

#: The number of parts in which an optimizer's state is copied, one after another.
_PIECES = 8

_Value = TypeVar("_Value")

_NO_MEMORY = "there is no memory to train it"


class _TrainedBatch(NamedTuple):
    """A batch of the pipeline on which the plain model has been trained too.

    Attributes:
        observed: The batch of the pipeline; its keys are those of the layers' random numbers.
        inputs: The inputs of this replica's micro-batches.
        everyone: The micro-batches of all replicas, one replica after another.
        loss: The loss of the plain model.
        earlier: By name, the gradients of this rank's parameters before the batch.
    """

    observed: ObservedBatch
    inputs: Sequence[Nest]
    everyone: MicroBatches
    loss: Nest
    earlier: dict[str, Tensor]


class Shadow(BatchObserver):
    """Compares a captured pipeline with its plain, uncaptured model for a number of batches."""

    def __init__(self, pipeline: PipelineParallel, captures: StagedCaptures, batches: int) -> None:
        """Prepares the comparison.

        Args:
            pipeline: The captured pipeline.
            captures: The captures of the plain model's forward, by which its stages run.
            batches: The number of batches that are compared, the first ones.
        """
        self._pipeline, self._pipe = pipeline, pipeline.layers
        self._captures, self._batches = captures, batches
        #: The copy of the plain model that is trained; None before the first batch.
        self._reference: Reference | None = None
        #: Marks of the attributes of all layers when the model was copied.
        self._marks_of_copy: Marks = {}
        #: The batch that runs; None if it is not compared.
        self._batch: _TrainedBatch | None = None
        #: How many batches are compared so far, and how many seconds that took.
        self._number = 0
        self._seconds = 0.0
        #: The names of the parameters whose memory the copy shares.
        self._sharing_memory: set[str] = set()
        #: By name the digests of the buffers after the last batch.
        self._digests_left: dict[str, str] = {}
        #: Whether copies of the optimizer step the reference, to compare the updates.
        self._copies_optimizer = False
        #: Why the plain model failed on the batch; the pipeline's stages may fail on it too.
        self._failure: str | None = None

    def begin(self, batch: ObservedBatch) -> None:
        """Trains the plain model on a batch that is about to run. Collective."""
        job = current_job()
        if job is not None:
            with (
                job.guarded(lambda: "training the plain model beside the pipeline"),
                self._count_seconds(),
            ):
                self._train_beside(batch)

    def _train_beside(self, batch: ObservedBatch) -> None:
        """Trains the plain model on a batch, and stores the batch for the comparison. Collective.

        Raises:
            CaptureError: The loss writes into a buffer of the model.
        """
        first = self._reference is None
        if self._end_if_impossible(find_obstacle(self._pipeline, self._captures, batch, first)):
            return
        reference = self._prepare(batch.optimizer)
        return_memory()
        batches_here, everyone = self._pipeline.share(batch.data)
        batch = batch._replace(keys=copy.copy(batch.keys))
        # Gradients of zeros, which an optimizer leaves, count as none.
        earlier = {
            name: gradient.clone()
            for name, gradient in self._gradients_by_name().items()
            if gradient is not None and _gradient_gap(gradient, None)
        }
        loss, failure, buffers = None, None, self._digest_buffers()
        put_back = buffers_kept([self._captures.capturer.model])
        try:
            loss = self._train(reference, everyone, batch)
        except Exception as error:
            lacks_memory = isinstance(error, MemoryError) or "ResourceExhausted" in str(error)
            failure = _NO_MEMORY if lacks_memory else str(error).partition("\n")[0]
        self._failure = _first_of_all_ranks(failure)
        if self._failure == _NO_MEMORY:
            self._end_if_impossible(_NO_MEMORY)
            return
        # The copy was trained, so that only the loss can have written into the model's buffers.
        now = self._digest_buffers().items()
        written = [name for name, digest in now if digest != buffers.get(name, digest)]
        if written := _first_of_all_ranks(written) or []:
            put_back()
            self._end()
            raise CaptureError(
                f"a loss function writes into {written[0]}, a buffer of the model",
                cause="a loss runs on the last rank alone, and where the stages overlap, a forward "
                "may come before or behind it",
                fix="keep that in the loss: a loss_fn that is a layer has buffers of its own",
            )
        gradients = self._gradients_by_name().items()
        added = [name for name, grad in gradients if _gradient_gap(grad, earlier.get(name))]
        for name in added:
            parameter = self._pipe.state.own_parameters()[name]
            drop_gradients([parameter])
            if name in earlier:
                set_gradient(parameter, earlier[name])
        if self._end_if_impossible(f"the loss uses {added[0]} of the model" if added else None):
            return
        self._batch = _TrainedBatch(batch, batches_here.inputs, everyone, loss, earlier)

    @contextmanager
    def _count_seconds(self) -> Iterator[None]:
        """Adds the seconds of the context to the time that the comparison took."""
        begin = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begin

    def _gradients_by_name(self) -> dict[str, Tensor | None]:
        """Returns the gradients of this rank's parameters by name."""
        parameters = self._pipe.state.own_parameters()
        return {name: dense(self._pipeline.gradient_of(p), p) for name, p in parameters.items()}

    def _train(self, reference: Reference, everyone: MicroBatches, batch: ObservedBatch) -> Nest:
        """Trains the plain model, without a change of the pipeline's loss functions."""
        with random_numbers_of_batch(batch.keys), losses_kept(self._pipe.loss_functions()):
            return ReferenceTrainer(self._pipeline, reference).train(everyone, batch.weights)

    def _end_if_impossible(self, obstacle: str | None) -> bool:
        """Ends the comparison if any rank has an obstacle; returns whether it ended. Collective."""
        first = _first_of_all_ranks(obstacle)
        if first is not None:
            log.once(
                _log.warning, f"the first batches are not shadowed by the plain model: {first}"
            )
            self._end()
        return first is not None

    def reduced(self, loss: Nest) -> None:
        """Compares the loss, the gradients, and the buffers after the forward. Collective.

        Raises:
            CaptureError: Something differs by more than rounding, on this rank or on another.
        """
        batch, reference = self._batch, self._reference
        if batch is None or reference is None:
            return
        if self._failure is not None:
            self._end()
            raise CaptureError(
                f"batch {self._number} runs through the stages, and the plain model alone fails on "
                f"it: {self._failure}",
                cause="the forward keeps something outside of the model that the loss or a later "
                "call reads, as auxiliary losses in a list",
                fix="return it from the forward, for the loss to take; no stage appends to a list",
            )
        with self._count_seconds():
            off = self._find_wrong_gradients(batch, reference)
            differences = [f"the gradient of {name}" for name in off]
            differences += self._compare_losses(loss, batch.loss) + self._compare_state(reference)
        self._refuse_differences(differences, off, batch)
        # Both optimizers step by the gradients of the stages, so that rounding does not matter.
        expected, of_stages = reference.tensors(), self._gradients_by_name()
        drop_gradients(expected[n] for n, gradient in of_stages.items() if gradient is not None)
        self._batch = batch._replace(earlier={})
        if batch.observed.optimizer is None:
            self._count_batch()

    def _find_wrong_gradients(self, batch: _TrainedBatch, reference: Reference) -> list[str]:
        """Returns the parameters of this rank whose gradients differ by more than rounding."""
        gradients, wrong = reference.gradients(), []
        rounding = Rounding(gradients, lambda: self._moved_gradients(reference, batch, gradients))
        for name, gradient in self._gradients_by_name().items():
            right, earlier = gradients.get(name), batch.earlier.get(name)
            if earlier is not None:
                right = earlier if right is None else right + earlier
            gap = _gradient_gap(gradient, right)
            if gap and not rounding.explains(name, gap):
                wrong.append(name)
        return wrong

    def step(self, step: Callable[[], None], optimizer: Optimizer, scaled: bool) -> None:
        """Steps the pipeline's and the reference's optimizer, and compares the parameters after it.

        Collective if a step of the optimizer is. ``scaled`` is not used.

        Raises:
            CaptureError: The parameters differ; they have their values from before the step again.
        """
        batch, reference = self._batch, self._reference
        if batch is None or reference is None or not self._copies_optimizer:
            step()
            if batch is not None:  # its gradients are compared; the optimizer has no copy
                self._count_batch()
            return
        parameters = self._pipe.state.own_parameters()
        with self._count_seconds():
            expected = self._expected_update(reference, batch.observed.optimizer)
            before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        step()
        with self._count_seconds():
            # The norm over ranks is summed in another order than that of one model.
            differences = [
                f"the update of {name}"
                for name, parameter in parameters.items()
                if largest_gap(parameter, expected[name]) > ROUNDING * largest_of(expected[name])
            ]
        try:
            self._refuse_differences(differences, None, batch)
        except CaptureError:
            for name, parameter in parameters.items():
                parameter.set_value(before[name])
            raise
        # The reference's parameters share the pipeline's memory again.
        for name in self._sharing_memory:
            set_data(expected[name], parameters[name].detach())
        del before  # so that its memory can be returned
        self._count_batch()

    def _expected_update(self, reference: Reference, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the plain model's parameters after copies of the optimizer have updated them.

        Each copy takes the optimizer's state of some parameters, and is dropped before the next is
        made: there may be no memory for the whole state twice. Collective over the pipeline.
        """
        expected, parameters = reference.tensors(), self._pipe.state.own_parameters()
        # Other ranks' parameters are not needed. A layer that is used twice has two names: by id.
        needed = {id(expected[name]) for name in parameters}
        release(t for t in expected.values() if id(t) not in needed and is_parameter(t))
        gradients = {name: self._pipeline.gradient_of(p) for name, p in parameters.items()}
        # The script may have set another clip since the last step.
        optimizer.bind(self._pipe)
        names = list(parameters)
        clips = [clip for clip in clips_of_a_step(optimizer.wrapped) if clip]
        # How many parameters a copy steps. An optimizer or clip of the script's own may need all
        # gradients at once.
        count = most = max(1, len(names))
        is_library = len(clips) < 2 and all(map(is_of_library, (optimizer.wrapped, *clips)))
        if is_library and optimizer.shards is None:
            most = -(-count // _PIECES)
            for clip in clips:
                if isinstance(clip, GlobalNormClip):  # of all gradients, before the first piece
                    stepped = optimized_parameters(optimizer.wrapped)
                    clip.measure([(p, self._pipeline.gradient_of(p)) for p in stepped])
        for start in range(0, count, most):
            piece = {name: parameters[name] for name in names[start : start + most]}
            for name in piece:
                if gradients[name] is not None:
                    expected[name].grad = gradients[name]
                move_to_new_memory(expected[name])
            return_memory()
            stepping = reference.copy_of(optimizer, self._pipe, piece)
            # Paddle numbers the names of optimizer states: the user's must not change by the copy.
            with paddle.utils.unique_name.guard():
                stepping.step()
            # The copy is part of a reference cycle, which would keep its state alive.
            stepping.__dict__.clear()
            drop_gradients(expected[name] for name in piece)
        return_memory()
        return expected

    def _prepare(self, optimizer: Optimizer) -> Reference:
        """Makes the reference ready for a batch: a copy of the plain model. Collective.

        The copy is made anew if the script has changed a layer's attributes; otherwise it gets the
        pipeline's values. Then it takes the pipeline's switches: ``stop_gradient``, ``need_clip``
        and the modes of layers.

        Args:
            optimizer: The pipeline's optimizer, or None. If a copy of it steps alike on all ranks,
                :meth:`step` will compare updates too.

        Returns:
            The reference, without gradients.
        """
        pipe, capturer = self._pipe, self._captures.capturer
        marks = mark_attributes(capturer.model, lambda *_: True)
        if self._reference is None or self._marks_of_copy != marks:
            self._reference, self._marks_of_copy = None, marks
            # Parameters that no forward writes into share the pipeline's memory, except while the
            # reference's optimizer steps.
            parameters = pipe.state.own_parameters()
            self._sharing_memory = parameters.keys() - capturer.unopened.written
            shared = [parameters[name] for name in self._sharing_memory]
            model = PlainCopy(capturer.model, capturer.example, capturer.unopened, shared)
            self._reference = of_model(pipe, model, None, None)
            self._reference.takes_switches = True
            # Rounding of a gradient is measured by the largest in its layer (``Rounding``), so that
            # gradients of layers without parameters on this rank are not needed.
            layers_here = {name.rpartition(".")[0] for name in parameters}
            names = self._reference.names.values()
            self._reference.uncompared = frozenset(
                name for name in names if name.rpartition(".")[0] not in layers_here
            )
        else:
            pipe.copy_to(self._reference.model)
            # On another rank a forward may have registered a buffer, which a new copy would have.
            self._reference.copy_hidden_buffers(pipe)
            self._take_unsaved_buffers(self._reference)
        self._copies_optimizer = all(all_ranks().all_gather(_can_be_copied(optimizer)))
        drop_gradients(self._reference.model.parameters())
        self._reference.copy_switches(pipe)
        return self._reference

    def _take_unsaved_buffers(self, reference: Reference) -> None:
        """Copies buffers that no state dict has, if the script has changed them since a batch."""
        for name, digest in self._digest_buffers().items():
            if name not in reference.names and self._digests_left.get(name) != digest:
                path, _, key = name.rpartition(".")
                source, copied = self._captures.capturer.model, reference.model.plain
                tensor: Tensor = buffers_in(layer_at(source, path))[key]
                buffers_in(layer_at(copied, path))[key] = tensor.detach().clone()

    def _digest_buffers(self) -> dict[str, str]:
        """Returns a digest of each buffer of the model that has memory on this rank, by name."""
        buffers = self._captures.capturer.model.named_buffers()
        return {name: digest_of(tensor) for name, tensor in buffers if has_memory(tensor)}

    def _moved_gradients(
        self, reference: Reference, batch: _TrainedBatch, gradients: dict[str, Tensor]
    ) -> State:
        """Returns the plain model's gradients from parameters changed by a unit in the last place.

        Args:
            reference: The reference that is trained again on the batch.
            batch: The batch.
            gradients: The plain model's gradients of the batch. Copies take their place, since
                clearing the batch's gradients empties their tensors.
        """
        train = partial(self._train, reference, batch.everyone, batch.observed)
        moved = moved_gradients(reference.model, {}, train, reference.gradients)
        gradients.update(reference.gradients())
        return moved

    def _compare_losses(self, loss: Nest, right: Nest) -> list[str]:
        """Returns ["the loss"] if the losses differ by more than rounding, else an empty list.

        Args:
            loss: The loss of the pipeline.
            right: The loss of the plain model.
        """
        # Several replicas sum the loss in another order.
        has_replicas = self._pipeline.replicas.ranks > 1
        for value, expected in zip(tensors_of(loss), tensors_of(right)):
            # A loss with a value for each micro-batch has another shape, and is not compared.
            if list(value.shape) == list(expected.shape):
                limit = ROUNDING * largest_of(expected) if has_replicas else 0
                if largest_gap(value, expected) > limit:
                    return ["the loss"]
        return []

    def _compare_state(self, reference: Reference) -> list[str]:
        """Returns in words which parameters, buffers and modes of layers differ before the step."""
        # With several replicas each one has running statistics of its own data.
        alone = self._pipeline.replicas.ranks == 1
        state = compare_state(self._pipe, reference, self._number, alone)
        differences = [f"what the forward wrote into {one.name}" for one in state if one.absolute]
        modes = {p: layer.training for p, layer in reference.model.named_sublayers()}
        differences += [
            f"the mode of {path}"
            for path, layer in self._pipe.named_sublayers()
            if modes.get(path, layer.training) != layer.training
        ]
        return differences

    def _refuse_differences(
        self, differing: list[str], gradients: Sequence[str] | None, batch: _TrainedBatch
    ) -> None:
        """Raises an error on all ranks if one of them has found a difference. Collective.

        Args:
            differing: What differs on this rank, in words.
            gradients: The parameters whose gradients differ; None after a step, which has no node.
            batch: The batch.
        """
        where = None
        if gradients is not None and differing:
            where = self._find_node(gradients, batch)
        parts = all_ranks().all_gather((differing, where))
        everything = [difference for of_rank, _ in parts for difference in of_rank]
        if not everything:
            return
        places = [place for of_rank, place in parts if of_rank and place]
        self._end()
        raise CaptureError(
            f"batch {self._number} does not train as the plain model does: {everything[0]} "
            f"differs{f', and {len(everything) - 1} more' * (len(everything) > 1)}",
            where=places[0] if places else None,
            expected="what the untouched model gives for the same micro-batches, beside which "
            "the first batches are trained; no optimizer has changed the parameters",
            cause=OUTSIDE_OF_PADDLE,
            fix="put that code into a sublayer, or its layer's class into no_split; where it is in "
            "one already, set recompute_interval=0 and schedule_mode='1F1B'",
        )

    def _find_node(self, names: Sequence[str], batch: _TrainedBatch) -> str | None:
        """Returns the layer, micro-batch, file and line of the first node that differs."""
        reference = self._reference
        if reference is None or not isinstance(reference.model, PlainCopy):
            return None
        capturer = self._captures.capturer
        again = Capturer(
            *(reference.model.plain, capturer.example), shape_inputs=capturer.shape_inputs
        )
        again.unopened = capturer.unopened
        captures, keys = StagedCaptures(again, ()), batch.observed.keys
        for number, inputs in enumerate(batch.inputs):
            staged = captures.for_batch(again.signature_for(inputs), training=True)
            if keys is not None:
                keys.micro_batch = GlobalMicroBatch(number)
            node = find_first_differing_node(again, staged, copy_tensors(inputs), keys)
            if node is not None:
                return f"first in {node.name}, micro-batch {number}, {node.location}"
        staged = self._captures.of_example(training=True)
        node = find_node_using(staged, self._captures.capturer.model, names, backwards=True)
        return None if node is None else f"in backward first in {node.name}, {node.location}"

    def _count_batch(self) -> None:
        """Counts the batch, and ends the comparison after the last one."""
        self._batch = None
        self._digests_left = self._digest_buffers()
        self._number += 1
        if self._number == self._batches:
            log.once(
                _log.info,
                f"the first {self._batches} batches were trained beside the untouched model as "
                f"well, which took {self._seconds:.3g} s, and trained alike; that ends here",
            )
            self._end()
        return_memory()

    def _end(self) -> None:
        """Ends the comparison: drops the plain model, so that the pipeline trains alone."""
        self._pipeline.accompany(None)
        self._reference = self._batch = None


def _first_of_all_ranks(value: _Value | None) -> _Value | None:
    """Returns the first value of all ranks that is not empty; None if there is none. Collective."""
    return next(filter(None, all_ranks().all_gather(value)), None)


def _gradient_gap(gradient: Tensor | None, right: Tensor | None) -> float:
    """Returns the largest difference between two gradients; None counts as zeros."""
    return largest_gap(*zeros_for_missing(gradient, right))


def _can_be_copied(optimizer: Optimizer) -> bool:
    """Returns whether a copy of an optimizer steps as the optimizer does.

    The result is False if a script has replaced the method ``step``, if this rank has only a shard
    of the optimizer's state, before the first step, or without an optimizer.
    """
    if optimizer is None or "step" in vars(optimizer.wrapped):
        return False
    state = optimizer.wrapped.state_dict().keys() - {"LR_Scheduler", "master_weights"}
    return optimizer.shards is None or not state

"""Captures the forward of a model once for each signature of a batch; start with ``Capturer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from fleetpipe import log
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.captured_state import lend_zeros
from fleetpipe.capture.tracing.model_snapshot import python_state_kept, state_kept
from fleetpipe.capture.tracing.signature import (
    Keys,
    Signature,
    inputs_with_signature,
    integer_tensors_at,
    signature_of,
)
from fleetpipe.capture.tracing.tracer import record
from fleetpipe.capture.tracing.user_lines import raising_location
from fleetpipe.capture.tracing.value import Capture, Unopened
from fleetpipe.dygraph.nest import map_tensors, outline
from fleetpipe.dygraph.observe.hooks import trial
from fleetpipe.errors import CaptureError, FleetPipeError, reason
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import has_memory

_log = log.logger(__name__)


class FirstBatch(NamedTuple):
    """The first batch of a signature, with whose integers each rank captures the forward.

    Attributes:
        text: The signature of the batch with the numbers of its tensors of integers.
        stages: The stages of this process that have sent the text to later stages.
    """

    text: str
    stages: set[int]


class Capturer:
    """Captures the forward of a model, and caches the captures of the example.

    Call it with the signature of a batch and a mode; it returns the capture.

    Attributes:
        model: The model.
        example: An example of the model's inputs.
        unopened: The layers that are not opened: a call of one is a single node.
        losses: The loss functions; the forward must not store tensors for them.
        shape_inputs: The keys of inputs whose numbers the forward may read.
        example_signature: The signature of the example.
        first_batches: For each other signature its first batch.
    """

    def __init__(
        self,
        model: Layer,
        example: Nest,
        no_split: Sequence[type] = (),
        losses: Sequence[Any] = (),
        shape_inputs: Keys = (),
    ) -> None:
        """Stores the model and the example; nothing is captured yet.

        Args:
            model: The model.
            example: An example of its inputs, for batches with the same shapes and dtypes.
            no_split: Classes of layers that are not opened.
            losses: The loss functions.
            shape_inputs: The keys of inputs whose numbers the forward may read.
        """
        self.losses = losses
        self.shape_inputs = shape_inputs
        self.first_batches: dict[Signature, FirstBatch] = {}
        self.model = model
        self.example = example
        self.unopened = Unopened(no_split)
        self.example_signature = signature_of(example, shape_inputs)
        self._traces: dict[bool, tuple[object, Capture]] = {}

    def signature_for(self, inputs: Nest) -> Signature:
        """Returns the signature of a batch's inputs, and stores the first batch with it.

        A capture takes its integers, as numbers may have to fit: tokens for images, the patches.
        """
        signature = signature_of(inputs, self.shape_inputs)
        if signature != self.example_signature and signature not in self.first_batches:
            self.first_batches[signature] = FirstBatch(signature_of(inputs, None), set())
        return signature

    def map_example(self, change: Callable[[Tensor], Tensor]) -> Nest:
        """Returns the example with ``change`` applied to its tensors, except ``shape_inputs``."""
        unchanged = set(map(id, integer_tensors_at(self.example, self.shape_inputs)))
        return map_tensors(lambda t: t if id(t) in unchanged else change(t), self.example)

    def __call__(self, signature: Signature, training: bool) -> Capture:
        """Returns the capture for a batch with this signature, in training or in evaluation.

        The capture of the example is made once for each mode, and anew if :meth:`_validity`
        changes.

        Raises:
            CaptureError: The forward does something that cannot be captured.
        """
        if signature != self.example_signature:
            sample = self.first_batches.get(signature)
            text = signature if sample is None else sample.text
            return self.capture_inputs(inputs_with_signature(text, self.example), training)
        traced = self._traces.get(training)
        if traced is None or traced[0] != self._validity(traced[1]):
            trace = self.capture_inputs(self.example, training)
            self._traces[training] = traced = (self._validity(trace), trace)
        return traced[1]

    def forget_captures(self) -> None:
        """Drops the cached captures, so that the next call runs the forward again."""
        self._traces.clear()
        self.unopened.forget_decisions()

    def _validity(self, trace: Capture) -> object:
        """Returns a value that changes when a capture of the example, ``trace``, is outdated."""
        modes = [layer.training for layer in self.model.sublayers(include_self=True)]
        read_buffers = [ref.tensor for ref in trace.numbers]
        return (
            self.unopened.changes,
            modes,
            [buffer.numpy().tobytes() for buffer in read_buffers if has_memory(buffer)],
            # A run that switches modes is captured each time.
            object() if trace.switched else None,
        )

    def capture_inputs(self, inputs: Nest, training: bool) -> Capture:
        """Captures one run of the forward.

        Args:
            inputs: The inputs of the run, which are not changed.
            training: Whether the model is in training.

        Raises:
            CaptureError: The forward does something that cannot be captured, or fails.
        """
        model = self.model
        try:
            # Without gradients in evaluation, as the stages run.
            with (
                trial(),
                self.notice_if_slow(),
                in_mode(model, training),
                paddle.set_grad_enabled(training),
            ):
                return record(model, inputs, self.unopened, self.losses, self.shape_inputs)
        except FleetPipeError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the forward of {type(model).__name__} fails: {reason(error)}",
                where=raising_location(error.__traceback__),
                got=f"inputs: {outline(inputs)}",
                cause="example_inputs are not what it takes, or it is made for one size of batch",
                fix="call the plain model with such inputs first: example_inputs is one argument, "
                "a tuple of arguments, or a dict by name",
            ) from error

    def notice_if_slow(self) -> AbstractContextManager[None]:
        """Returns a context that logs that the model is being captured, if it is open for long."""
        name = type(self.model).__name__
        return log.once_if_slow(
            _log.info, f"capturing {name}: its forward runs in both modes, and on other numbers"
        )


@contextmanager
def in_mode(model: Layer, training: bool) -> Iterator[None]:
    """Puts a model into training or evaluation while this context is open, then restores modes.

    It also restores everything else that the model's own ``train`` and ``eval`` change, such as
    merged adapters.
    """
    layers = model.sublayers(include_self=True)
    modes = [(layer, vars(layer).get("training")) for layer in layers]
    with ExitStack() as stack:
        if _has_own_switch(model):
            stack.enter_context(python_state_kept(model))
            stack.enter_context(state_kept(model))
        try:
            switch_mode(model, training)
            yield
        finally:
            for layer, mode in modes:
                vars(layer).pop("training", None)
                if mode is not None:
                    layer.training = mode


def switch_mode(model: Layer, training: bool) -> None:
    """Puts a model into training or evaluation by its own ``train()`` or ``eval()``.

    If the model is in that mode already, layers whose modes were set separately keep their modes.
    """
    modes = [layer.training for layer in model.sublayers(include_self=True)]
    # Weights of other ranks are zeros meanwhile; writes into them are dropped.
    with lend_zeros(model.state_dict().values() if _has_own_switch(model) else ()):
        if training and (not model.training or all(modes)):
            model.train()
        elif not training and (model.training or not any(modes)):
            model.eval()


def _has_own_switch(model: Layer) -> bool:
    """Returns whether a layer's class overrides ``train`` or ``eval``, which may do anything."""
    usual = paddle.nn.Layer
    return any(
        (type(layer).train, type(layer).eval) != (usual.train, usual.eval)
        or vars(layer).keys() & {"train", "eval"}
        for layer in model.sublayers(include_self=True)
    )

"""Captures the forward of a model once for each signature of a batch; start with ``Capturing``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from fleetpipe import log
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.captured_state import lent
from fleetpipe.capture.tracing.model_snapshot import python_state_kept, state_kept
from fleetpipe.capture.tracing.signature import (
    Keys,
    Signature,
    numbers_like,
    signature_of,
    whole_at,
)
from fleetpipe.capture.tracing.tracer import record
from fleetpipe.capture.tracing.user_lines import raised_at
from fleetpipe.capture.tracing.value import Capture, Unopened
from fleetpipe.dygraph.nest import map_tensors, outline
from fleetpipe.dygraph.observe.hooks import trial
from fleetpipe.errors import CaptureError, FleetPipeError, reason
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import has_memory

_log = log.logger(__name__)


class FirstBatch(NamedTuple):
    """Whole numbers of the first batch with a signature, from which it is captured on each rank.

    Attributes:
        text: The signature with the numbers.
        stages: The stages that have sent it to later ones.
    """

    text: str
    stages: set[int]


class Capturing:
    """A model with an example of its inputs, and the captures of its forward so far.

    Attributes:
        model: The model.
        example: The example.
        unopened: The layers that are nodes as a whole.
        losses: The loss functions; the forward must not store tensors for them.
        shape_inputs: The keys of inputs whose numbers the forward may read.
        look: The signature of the example.
        samples: For each other signature, whole numbers of its first batch.
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
            no_split: Classes of layers that are nodes as a whole.
            losses: The loss functions.
            shape_inputs: The keys of inputs whose numbers the forward may read.
        """
        self.losses = losses
        self.shape_inputs = shape_inputs
        self.samples: dict[Signature, FirstBatch] = {}
        self.model = model
        self.example = example
        self.unopened = Unopened(no_split)
        self.look = signature_of(example, shape_inputs)
        self._traces: dict[bool, tuple[object, Capture]] = {}

    def look_of(self, inputs: Nest) -> Signature:
        """Returns the signature of inputs, and stores the whole numbers of its first batch.

        A capture needs them where numbers have to fit, as tokens of images fit the patches.
        """
        look = signature_of(inputs, self.shape_inputs)
        if look != self.look and look not in self.samples:
            self.samples[look] = FirstBatch(signature_of(inputs, None), set())
        return look

    def vary(self, change: Callable[[Tensor], Tensor]) -> Nest:
        """Returns the example with changed tensors, except ``shape_inputs``."""
        kept = set(map(id, whole_at(self.example, self.shape_inputs)))
        return map_tensors(lambda t: t if id(t) in kept else change(t), self.example)

    def __call__(self, signature: Signature, training: bool) -> Capture:
        """Returns the capture for a batch with this signature, in training or in evaluation.

        Raises:
            CaptureError: The forward does something that cannot be captured.
        """
        if signature != self.look:
            sample = self.samples.get(signature)
            text = signature if sample is None else sample.text
            return self.with_numbers(numbers_like(text, self.example), training)
        traced = self._traces.get(training)
        if traced is None or traced[0] != self._depends_on(traced[1]):
            trace = self.with_numbers(self.example, training)
            self._traces[training] = traced = (self._depends_on(trace), trace)
        return traced[1]

    def forget(self) -> None:
        """Drops the captures, so that the next call runs the forward again."""
        self._traces.clear()
        self.unopened.forget()

    def _depends_on(self, trace: Capture) -> object:
        """Returns a value that changes if a new capture of the same inputs may be another one."""
        modes = [layer.training for layer in self.model.sublayers(include_self=True)]
        numbers = [getattr(owned.layer, owned.name) for owned in trace.numbers]
        return (
            self.unopened.changes,
            modes,
            [tensor.numpy().tobytes() for tensor in numbers if has_memory(tensor)],
            # A run that switches modes is captured each time.
            object() if trace.switched else None,
        )

    def after(self, trace: Capture, signature: Signature, training: bool) -> Capture:
        """Returns a capture that starts with the layer modes that another capture has left."""
        with in_mode(self.model, training):
            for mode in trace.switched:
                mode.put_back()
            return self(signature, training)

    def with_numbers(self, inputs: Nest, training: bool) -> Capture:
        """Returns a capture with these inputs, which are not changed.

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
                where=raised_at(error.__traceback__),
                got=f"inputs: {outline(inputs)}",
                cause="example_inputs are not what it takes, or it is made for one size of batch",
                fix="call the plain model with such inputs first: example_inputs is one argument, "
                "a tuple of arguments, or a dict by name",
            ) from error

    def notice_if_slow(self) -> AbstractContextManager[None]:
        """While this context is open and takes long, logs that the model is being captured."""
        name = type(self.model).__name__
        return log.once_if_slow(
            _log.info, f"capturing {name}: its forward runs in both modes, and on other numbers"
        )


@contextmanager
def in_mode(model: Layer, training: bool) -> Iterator[None]:
    """While this context is open, a model is in training or evaluation; then modes are restored.

    It also restores everything that the model's own ``train`` and ``eval`` change, such as merged
    adapters.
    """
    layers = model.sublayers(include_self=True)
    modes = [(layer, vars(layer).get("training")) for layer in layers]
    with ExitStack() as kept:
        if _has_own_switch(model):
            kept.enter_context(python_state_kept(model))
            kept.enter_context(state_kept(model))
        try:
            switch(model, training)
            yield
        finally:
            for layer, mode in modes:
                vars(layer).pop("training", None)
                if mode is not None:
                    layer.training = mode


def switch(model: Layer, training: bool) -> None:
    """Puts a model into training or evaluation by its own ``train()`` or ``eval()``.

    If it is in that mode already, layers whose modes were set separately keep them.
    """
    modes = [layer.training for layer in model.sublayers(include_self=True)]
    # Weights of other ranks are zeros meanwhile; what it writes into them is dropped.
    with lent(model.state_dict().values() if _has_own_switch(model) else ()):
        if training and (not model.training or all(modes)):
            model.train()
        elif not training and (model.training or not any(modes)):
            model.eval()


def _has_own_switch(model: Layer) -> bool:
    """Whether a layer's ``train`` or ``eval`` is not Paddle's: it may do more than set modes."""
    usual = paddle.nn.Layer
    return any(
        (type(layer).train, type(layer).eval) != (usual.train, usual.eval)
        or vars(layer).keys() & {"train", "eval"}
        for layer in model.sublayers(include_self=True)
    )

"""Runs the forward of a model whenever another run of it has to be known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from fleetpipe import log
from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.tracing.model_snapshot import python_state_kept, state_kept
from fleetpipe.capture.tracing.place import raised_at
from fleetpipe.capture.tracing.signature import Signature, numbers_like, signature_of
from fleetpipe.capture.tracing.tracer import traced
from fleetpipe.capture.tracing.value import Capture
from fleetpipe.capture.tracing.walk import Unopened
from fleetpipe.dygraph.nest import outline
from fleetpipe.errors import CaptureError, FleetPipeError, reason
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import has_memory

_log = log.logger(__name__)


class Capturing:
    """A model with an example of its inputs.

    Attributes:
        model: The model.
        example: The example.
        unopened: Which of its layers are nodes as a whole.
        losses: The loss functions, which find nothing that the forward keeps.
    """

    def __init__(
        self,
        model: Layer,
        example: Nest,
        no_split: Sequence[type] = (),
        losses: Sequence[Any] = (),
    ) -> None:
        """Begins without a run.

        Args:
            model: The model.
            example: An example of its inputs, which is used for a batch that looks like it.
            no_split: Classes of layers that are nodes as a whole.
            losses: The loss functions.
        """
        self.losses = losses
        self.model = model
        self.example = example
        self.unopened = Unopened(no_split)
        self._look = signature_of(example)
        self._traces: dict[bool, tuple[object, Capture]] = {}

    def __call__(self, signature: Signature, training: bool) -> Capture:
        """Returns what the forward calls, for a batch of a look, in training or in evaluation.

        Raises:
            CaptureError: It does what no node can be made of.
        """
        if signature != self._look:
            return self.with_numbers(numbers_like(signature, self.example), training)
        traced = self._traces.get(training)
        if traced is None or traced[0] != self._depends_on(traced[1]):
            trace = self.with_numbers(self.example, training)
            self._traces[training] = traced = (self._depends_on(trace), trace)
        return traced[1]

    def forget(self) -> None:
        """Has the forward run again on the example when it is next asked for."""
        self._traces.clear()
        self.unopened.forget()

    def _depends_on(self, trace: Capture) -> object:
        """Returns what another run would depend on, beside its inputs, to be compared."""
        modes = [layer.training for layer in self.model.sublayers(include_self=True)]
        numbers = [getattr(owned.layer, owned.name) for owned in trace.numbers]
        return (
            self.unopened.changes,
            modes,
            [tensor.numpy().tobytes() for tensor in numbers if has_memory(tensor)],
            # Each run may leave other modes to the next.
            object() if trace.switched else None,
        )

    def after(self, trace: Capture, signature: Signature, training: bool) -> Capture:
        """Returns a run from the modes in which another has left the layers that it switched."""
        with in_mode(self.model, training):
            for mode in trace.switched:
                mode.put_back()
            return self(signature, training)

    def with_numbers(self, inputs: Nest, training: bool) -> Capture:
        """Returns what the forward calls for these inputs, which stay as they are.

        Raises:
            CaptureError: It does what no node can be made of, or fails.
        """
        model = self.model
        try:
            # As each will run: nothing in evaluation needs a gradient.
            with self.notice_if_slow(), in_mode(model, training), paddle.set_grad_enabled(training):
                return traced(model, inputs, self.unopened, self.losses)
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
        """Within it a line says, once it takes long, that the model is captured."""
        name = type(self.model).__name__
        return log.once_if_slow(
            _log.info, f"capturing {name}: its forward runs in both modes, and on other numbers"
        )


@contextmanager
def in_mode(model: Layer, training: bool) -> Iterator[None]:
    """Within it a model is in training or in evaluation; its layers' modes are put back.

    So is all that its own ``train`` and ``eval`` change, as adapters that they merge into weights.
    """
    modes = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    with ExitStack() as kept:
        if _has_own_switch(model):
            kept.enter_context(python_state_kept(model))
            kept.enter_context(state_kept(model))
        try:
            switch(model, training)
            yield
        finally:
            for layer, mode in modes:
                layer.training = mode


def switch(model: Layer, training: bool) -> None:
    """Puts a model into training or evaluation by its own ``train()`` or ``eval()``.

    Where it is there, and the modes of some layers were set by themselves, these stay.
    """
    modes = [layer.training for layer in model.sublayers(include_self=True)]
    # What it writes into weights of other ranks is nothing to anybody.
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

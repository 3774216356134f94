"""Reads and sets the gradients of parameters, and explains errors of failed backwards.

The gradient is ``main_grad`` for a mixed-precision parameter, else ``grad``: Paddle's
``MixPrecisionLayer`` adds up gradients of float16 and bfloat16 parameters in float32, in the
attribute ``main_grad``, and ``grad`` stays empty.

``paddle.grad`` in a forward or a loss cannot differentiate by a tensor of another stage. A physics
loss, for example, differentiates the model's output by its input, but the operations between the
two are in the graphs of several stages: :func:`grad_across_stages_error` returns the error.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from pathlib import Path

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.nest import outline
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns the gradient of ``parameter``: its float32 ``main_grad``, else ``grad``, or None."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


@paddle.no_grad()
def dense(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Returns a gradient as a dense tensor; None stays None.

    A sparse embedding's gradient has only the rows of the ids that were looked up.
    """
    if gradient is None or not gradient.is_selected_rows():
        return gradient
    return paddle.add_n([paddle.zeros_like(parameter), gradient])


def set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Sets the gradient of ``parameter``: its ``main_grad`` if it has one, else its ``grad``."""
    if hasattr(parameter, "main_grad"):
        parameter.main_grad = gradient
    else:
        parameter.grad = gradient


def zero_gradient(parameter: Tensor) -> Tensor:
    """Returns a gradient of zeros for a parameter, in the dtype of its gradient."""
    if hasattr(parameter, "main_grad"):
        return paddle.zeros(parameter.shape, "float32")
    return paddle.zeros_like(parameter)


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Frees the gradients of ``parameters``."""
    for parameter in parameters:
        # By position, since Paddle ignores the keyword.
        parameter.clear_gradient(False)
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad = None


@paddle.no_grad()
def divide_gradients(parameters: Iterable[Tensor], divisor: int) -> None:
    """Divides by ``divisor`` the gradients of those of ``parameters`` that have one."""
    if divisor == 1:
        return
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None and gradient.is_selected_rows():
            factor = paddle.to_tensor(1 / divisor, gradient.dtype)
            set_gradient(parameter, gradient.multiply(factor))
        elif gradient is not None:
            set_gradient(parameter, gradient / divisor)


def explain_backward_error(error: Exception) -> Exception:
    """Returns the error to raise for an error of a backward: a clear one if its cause is known."""
    kernel = re.search(r"function .* is not implemented for data type `\w+`", str(error))
    if kernel:
        return BoundaryError(
            "Paddle has no backward of an operation for the dtype that it was given",
            got=kernel[0],
            cause="labels with a fraction, where CrossEntropyLoss takes the numbers of classes; or "
            "a layer that computes in a dtype which this device lacks",
            fix="labels.astype('int64'), or soft_label=True of a loss that takes shares",
        )
    return second_backward_error() if "backward twice" in str(error) else error


def second_backward_error() -> BoundaryError:
    """Returns the error of a backward that reaches the graph of an earlier backward."""
    return BoundaryError(
        "a backward came to operations that an earlier one has run through",
        expected="layers that use nothing but what they are given and their parameters",
        cause="a layer keeps a tensor beside what it returns, in a list of its module or an "
        "attribute, and a layer of another stage, of another micro-batch, or the loss uses it",
        fix="return the tensor with the output, (output, kept), and have the layers behind hand "
        "it on; or keep kept.detach()",
    )


def is_raised_in_paddle_grad(error: Exception) -> bool:
    """Whether an error of a layer or a loss was raised within a ``paddle.grad`` that it called."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = Path(paddle.__file__).parent
    return any(
        code.co_name == "grad" and inside in Path(code.co_filename).parents for code in codes
    )


def grad_across_stages_error(error: Exception, where: str, value: Nest) -> BoundaryError:
    """Returns the error to raise if ``paddle.grad`` failed in the forward of a stage.

    Args:
        error: The error of ``paddle.grad``.
        where: The name of the layer or the loss that called it.
        value: The argument of the layer or the loss.
    """
    return BoundaryError(
        f"{where} differentiates by a tensor from which nothing leads to the result in this stage",
        where=_line_of_user(error),
        expected="all that lies between the two in one stage: a stage has a graph of its own",
        got=outline(value),
        cause="the tensor came with the value, and what was computed of it in stages before is "
        "not in this one's graph; or it has stop_gradient=True",
        fix="put the layers between the two into one layer of the list (of a plain model: into one "
        "sublayer) whose forward calls paddle.grad(.., create_graph=True) and returns it too",
    )


def _line_of_user(error: Exception) -> str | None:
    """Returns ``"file:line"`` of the innermost user code in a traceback; None without any."""
    # The package decorator wraps functions of Paddle 2.6.2.
    foreign = ("paddle", "fleetpipe", "decorator")
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in foreign
    ]
    return lines[-1] if lines else None

"""Which parameters are experts', and what they have when no token came to them."""

from __future__ import annotations

from collections.abc import Mapping

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.gradients import gradient_of, set_gradient, zero_gradient

#: The name under which Paddle's layer and the libraries' keep their experts.
LIST = "experts"


def is_expert(name: str) -> bool:
    """Whether the parameter with a lasting name is one of an expert."""
    return LIST in name.split(".")


def fill_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Gives experts to which no token of a batch came a gradient of zeros.

    They have none where a layer does not call them. But a dense mixture's are zeros, by which an
    optimizer with momentum steps.

    Args:
        parameters: By lasting name; of those that are no experts' none changes.
    """
    for name, parameter in parameters.items():
        idle = not parameter.stop_gradient and gradient_of(parameter) is None
        if idle and is_expert(name):
            set_gradient(parameter, zero_gradient(parameter))

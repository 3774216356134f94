"""Trains the unsplit program by Paddle's own calls: the reference for a static pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleetpipe.aliases import Optimizer, Place, Variable
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import learning_rate_of, set_dtype
from fleetpipe.paddle_api.static import is_initialized, overwrite, static
from fleetpipe.representation import shows


@shows("optimizer", micro_batches="_micro_batches")
class SingleProgram:
    """Trains the unsplit program: sums the gradients of micro-batches in NumPy, then steps once.

    It has its own programs and scope, and changes no others.
    """

    def __init__(
        self,
        build: Callable[[], Sequence[Variable]],
        optimizer: Callable[[], Optimizer],
        micro_batches: int,
        place: Place | None = None,
    ) -> None:
        """Builds and initialises the program; call it in static mode.

        Args:
            build: Builds the network in the default program; returns the values to fetch, the loss
                first.
            optimizer: Returns a new Paddle optimizer.
            micro_batches: The number of micro-batches of a batch, m.
            place: The device; None for the device of this process.
        """
        self._scope, self._micro_batches = static.Scope(), micro_batches
        self._executor = static.Executor(place)
        self._main, startup = static.Program(), static.Program()
        self._update, update_startup = static.Program(), static.Program()
        with paddle.utils.unique_name.guard():
            with static.program_guard(self._main, startup):
                self._fetches = list(build())
                # Divided before backward: dividing gradients afterwards rounds differently.
                loss = paddle.scale(self._fetches[0], 1.0 / micro_batches)
                pairs = static.append_backward(loss)
            self._gradients = {p.name: grad for p, grad in pairs if grad is not None}
            self.optimizer = optimizer()
            with static.program_guard(self._update, update_startup):
                _append_step(self.optimizer, [p for p, grad in pairs if grad is not None])
        with static.scope_guard(self._scope):
            # The first program creates the optimizer's state; the second one sets the parameters.
            self._executor.run(update_startup)
            self._executor.run(startup)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that are trained."""
        return list(self._gradients)

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets parameters and statistics by name."""
        for name, value in state.items():
            overwrite(self._scope.find_var(name).get_tensor(), value)

    def state(self) -> dict[str, np.ndarray]:
        """Returns the program's parameters and running statistics by name, sorted."""
        names = sorted(v.name for v in self._main.list_vars() if v.persistable)
        variables = {name: self._scope.find_var(name) for name in names}
        return {
            name: np.array(variable.get_tensor())
            for name, variable in variables.items()
            if variable is not None and is_initialized(variable.get_tensor())
        }

    def step(self, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Trains on one mini-batch.

        Args:
            feed: Arrays of m times the rows of a micro-batch.

        Returns:
            The mean over micro-batches of each fetched value.
        """
        values_by_micro_batch = []
        sums: dict[str, np.ndarray] = {}
        count = self._micro_batches
        with static.scope_guard(self._scope):
            for index in range(count):
                fetched = self._executor.run(
                    self._main,
                    feed={name: np.split(array, count)[index] for name, array in feed.items()},
                    fetch_list=[*self._fetches, *self._gradients.values()],
                )
                values_by_micro_batch.append(fetched[: len(self._fetches)])
                for name, grad in zip(self._gradients, fetched[len(self._fetches) :]):
                    sums[name] = sums[name] + grad if name in sums else grad
            self._executor.run(
                self._update, feed={f"{name}.sum": total for name, total in sums.items()}
            )
        rate = learning_rate_of(self.optimizer)
        if isinstance(rate, paddle.optimizer.lr.LRScheduler):
            rate.step()
        return [
            functools.reduce(np.add, [value / np.float32(count) for value in values])
            for values in zip(*values_by_micro_batch)
        ]


def _append_step(optimizer: Optimizer, parameters: Sequence[Variable]) -> None:
    """Appends the optimizer's step to the current program, which gets the gradients as feeds.

    Args:
        optimizer: The optimizer.
        parameters: The parameters of the main program; the current program gets its own, of the
            same names, and for each a feed ``"<name>.sum"``.
    """
    copies, gradients = [], []
    for parameter in parameters:
        attr = paddle.ParamAttr(
            name=parameter.name,
            initializer=paddle.nn.initializer.Constant(0.0),
            learning_rate=(parameter.optimize_attr or {}).get("learning_rate", 1.0),
            regularizer=parameter.regularizer,
            need_clip=parameter.need_clip,
        )
        copies.append(static.create_parameter(parameter.shape, "float32", attr=attr))
        gradients.append(static.data(f"{parameter.name}.sum", parameter.shape, "float32"))
    set_dtype(optimizer, copies[0].dtype)
    optimizer.apply_gradients([*zip(copies, gradients)])

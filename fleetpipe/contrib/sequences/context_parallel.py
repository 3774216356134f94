"""Paddle's plans for context parallelism, for layers of any model in dynamic graph.

``paddle.distributed`` has classes with these names for its semi-automatic mode. Here a plan changes
one layer, and the job's degrees decide which ranks share a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.contrib.sequences.attention import attention
from fleetpipe.contrib.sequences.parts import sequence_ranks
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle, replaced

#: By backend, the axis that it splits sequences along.
_AXES = {"p2p": "cp", "all2all": "sep"}
_functions: Any = paddle.nn.functional


class _Plan:
    """The base of this module's plans: stores along which axis the ranks share sequences."""

    def __init__(self, backend: str = "p2p") -> None:
        """Chooses the axis along which ranks share sequences.

        Args:
            backend: ``"p2p"``, the ring along cp, or ``"all2all"``, the exchange along sep.
        """
        if backend not in _AXES:
            raise ConfigError(
                "backend is 'p2p' or 'all2all'",
                got=repr(backend),
                fix=f"{type(self).__name__}('p2p')",
            )
        self.backend = backend

    def _require_degrees(self) -> None:
        """Raises ConfigError if the job splits sequences along an axis that is not the plan's."""
        for axis, group in sequence_ranks()._asdict().items():
            if group.ranks > 1 and axis != _AXES[self.backend]:
                raise ConfigError(
                    f"backend={self.backend!r} splits sequences along {_AXES[self.backend]}",
                    got=f"{axis}_degree={group.ranks}",
                    fix=f"set {_AXES[self.backend]}_degree, or choose the other backend; for both "
                    "axes call fleetpipe.dygraph.sequences.attention",
                )


class PrepareContextParallel(_Plan):
    """Cuts the arguments of a layer, the first of a model, to this rank's positions."""

    def apply(self, layer: Layer, process_mesh: Any = None, shard_param_list: Any = None) -> None:
        """Replaces the tensors ``[rows, length, ..]`` that ``layer`` gets by this rank's positions.

        Args:
            layer: A layer that every rank calls with whole sequences.
            process_mesh: Accepted as in Paddle, without effect; the job's degrees decide.
            shard_param_list: Accepted as in Paddle, without effect.
        """

        def cut_inputs(_: Layer, inputs: Nest) -> Nest:
            self._require_degrees()
            return sequence_ranks().own_part(inputs)

        layer.register_forward_pre_hook(cut_inputs)


class ContextParallel(_Plan):
    """Makes a layer that calls ``scaled_dot_product_attention`` attend to all ranks' positions."""

    def apply(self, layer: Layer, process_mesh: Any = None, shard_param_list: Any = None) -> None:
        """Replaces ``scaled_dot_product_attention`` while ``layer`` runs, so that it is collective.

        From then on a call of the layer raises a ``ConfigError`` if it does not call that function,
        or calls it with a mask or dropout.

        Args:
            layer: A layer that calls ``paddle.nn.functional.scaled_dot_product_attention``.
            process_mesh: Accepted as in Paddle, without effect; the job's degrees decide.
            shard_param_list: Accepted as in Paddle, without effect.
        """
        forward: Callable[..., Nest] = layer.forward

        @functools.wraps(forward)
        def attend_to_all_positions(*inputs: Nest, **named: Nest) -> Nest:
            self._require_degrees()
            with _replace_attention() as calls:
                output = forward(*inputs, **named)
            if not calls:
                raise ConfigError(
                    f"{type(layer).__name__} does not attend to other ranks' places",
                    cause="it does not call paddle.nn.functional.scaled_dot_product_attention by "
                    "that name",
                    fix="call fleetpipe.dygraph.sequences.attention in it",
                )
            return output

        layer.forward = attend_to_all_positions


@contextmanager
def _replace_attention() -> Iterator[list[None]]:
    """In this context, :func:`attention` replaces Paddle's ``scaled_dot_product_attention``.

    Yields:
        A list with an item for each call of the function.
    """
    calls: list[None] = []

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        training: bool = True,
        **named: Any,
    ) -> Tensor:
        calls.append(None)
        if attn_mask is not None or (dropout_p and training):
            raise ConfigError(
                "attention over split sequences has no mask of scores and no dropout",
                got=f"dropout_p={dropout_p}, attn_mask "
                + ("None" if attn_mask is None else f"{attn_mask.shape}"),
                fix="is_causal=True; for packed documents "
                "fleetpipe.dygraph.sequences.attention(.., documents=..)",
            )
        return attention(query, key, value, is_causal, scale=named.get("scale"))

    with replaced((_functions, "scaled_dot_product_attention", attend)):
        yield calls

"""Moves hooks on gradients next to the computation of their value.

A hook must see the whole gradient of a value. In a later stage than the value's own it would see
only that stage's part. It can be registered at any time before backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleetpipe.capture.tracing.value import Node, Ref
from fleetpipe.paddle_api.operations import GRAD_HOOKS


def at_makers(nodes: Sequence[Node], marks: Sequence[int]) -> tuple[list[Node], list[int]]:
    """Moves each node that registers or removes a hook right after the node of its value.

    Returns:
        The nodes in their new order, and the marks in it.
    """
    makers: dict[int, int] = {}
    moved: dict[int, list[Node]] = {}
    stay: list[int] = []
    for number, node in enumerate(nodes):
        maker = _maker(node, makers)
        if maker is None:
            stay.append(number)
            makers.update(dict.fromkeys(node.makes, number))
        else:
            made_in = nodes[maker].scopes[:-1] if nodes[maker].is_layer else nodes[maker].scopes
            moved.setdefault(maker, []).append(replace(node, scopes=made_in))
    ordered: list[Node] = []
    begins: list[int] = []
    for number in stay:
        begins += [len(ordered)] * (number + 1 - len(begins))
        ordered += [nodes[number], *moved.get(number, ())]
    begins += [len(ordered)] * (len(nodes) + 1 - len(begins))
    return ordered, [begins[mark] for mark in marks]


def _maker(node: Node, makers: dict[int, int]) -> int | None:
    """Returns the node that computes the value of a hook; None for other nodes."""
    if getattr(node.function, "__name__", "") not in GRAD_HOOKS or not isinstance(
        node.args[0], Ref
    ):
        return None
    return makers.get(node.args[0].value)

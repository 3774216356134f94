"""Writes a capture in Graphviz's language: its nodes and the values between them, by stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from fleetpipe.capture.tracing.value import Capture, ValueId

#: Okabe and Ito's colours, lighter, so that black text is legible on them.
_COLOURS = ("#8fc7e8", "#f5c56b", "#86d1b3", "#e6b3cf", "#f2a27f", "#f4ec9a", "#9fb6d9", "#cfcfcf")


def graph(trace: Capture, starts: Sequence[int] = ()) -> str:
    """Returns the text of a directed graph for ``dot -Tsvg``.

    Nodes have the colour of their stage. A value that crosses to another stage is a red arrow,
    drawn once, with its bytes.

    Args:
        trace: A run of the forward.
        starts: The first node of each stage after stage 0; empty for a model that is not cut.
    """
    lines = ["digraph capture {", "  rankdir=TB; node [shape=box, fontname=Helvetica];"]
    lines.append("  inputs [shape=plain]; outputs [shape=plain];")
    for number, node in enumerate(trace.nodes):
        colour = _COLOURS[bisect_right(starts, number) % len(_COLOURS)]
        style = "filled" if node.is_layer else "filled,dashed"
        lines.append(
            f'  n{number} [label={_quote(node.name)}, style="{style}", fillcolor="{colour}"];'
        )
    return "\n".join([*lines, *_arrows(trace, starts), "}"])


def _arrows(trace: Capture, starts: Sequence[int]) -> Iterator[str]:
    """Yields an arrow for each use of a value."""
    uses = [(f"n{number}", number, sorted(node.uses)) for number, node in enumerate(trace.nodes)]
    uses.append(("outputs", len(trace.nodes), list(trace.output_values)))
    crossed: set[tuple[ValueId, int]] = set()
    for target, number, values in uses:
        stage = bisect_right(starts, number)
        for value in values:
            maker = trace.maker(value)
            source, like = "inputs" if maker is None else f"n{maker}", trace.likes[value]
            label, colour = str(like), ""
            made_in = 0 if maker is None else bisect_right(starts, maker)
            if made_in != stage and (value, stage) not in crossed:
                crossed.add((value, stage))
                label, colour = f"{label}, {like.nbytes:,} bytes", ', color="#b00020"'
            yield f"  {source} -> {target} [label={_quote(label)}{colour}];"


def _quote(text: str) -> str:
    return '"' + text.replace('"', "'") + '"'

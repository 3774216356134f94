"""``fleetpipe.explain``: shows the nodes of a model, where it may be cut, and why not elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleetpipe.capture.arguments import require_plain_model, require_whole, resolve_no_split
from fleetpipe.capture.cutting.auto import find_cut_points, measure_nodes, parameter_bytes
from fleetpipe.capture.cutting.split_spec import Border
from fleetpipe.capture.repeatability import require_same_calls
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.capture.tracing.signature import ROWS, fill_input_specs
from fleetpipe.capture.tracing.value import Capture, ValueId
from fleetpipe.paddle_types import Inputs, Layer
from fleetpipe.profiling import LayerCost
from fleetpipe.representation import shows, table

#: Okabe and Ito's colours, lighter, so that black text is legible on them.
_COLOURS = ("#8fc7e8", "#f5c56b", "#86d1b3", "#e6b3cf", "#f2a27f", "#f4ec9a", "#9fb6d9", "#cfcfcf")


@shows("places", "parameters", nodes="trace.nodes")
@dataclass(frozen=True)
class Explanation:
    """The capture of a model; its text is a table of the nodes in the order in which they run.

    Attributes:
        trace: The captured forward in training.
        places: By the number of a node with which a stage may begin, the border before it.
        refused: The reason why a stage may not begin with a node, by the node's number.
        crossing: For each node the bytes that would cross to a stage that began with it, for one
            micro-batch like the example.
        parameters: For each node the bytes of its parameters and buffers that no earlier node uses.
        unopened: By a layer's path, the reason why the layer is one node though it has sublayers.
        costs: The cost of each node; None if nothing was measured.
    """

    trace: Capture
    places: Mapping[int, Border]
    refused: Mapping[int, str]
    crossing: Sequence[int]
    parameters: Sequence[int]
    unopened: Mapping[str, str]
    costs: Sequence[LayerCost] | None = None

    def __str__(self) -> str:
        rows = list(self._rows())
        lines = [f"not opened: {path}: {reason}" for path, reason in self.unopened.items()]
        return "\n".join([table(rows, left=range(len(rows[0]))), *lines])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the heading of the table, and a row for each node."""
        times = () if self.costs is None else ("F ms", "B ms")
        yield ("node", "what", "makes", "bytes before", "parameters", *times, "a cut before it")
        for number, node in enumerate(self.trace.nodes):
            cost = None if self.costs is None else self.costs[number]
            refusal = f"no: {self.refused[number]}" if number in self.refused else ""
            yield (
                str(number),
                node.name,
                ", ".join(str(self.trace.specs[value]) for value in node.outputs),
                f"{self.crossing[number]:,}" if number else "",
                f"{self.parameters[number]:,}",
                *(f"{1e3 * time:.3g}" for time in ((cost.forward, cost.whole) if cost else ())),
                str(self.places.get(number, refusal)),
            )

    def graphviz(self) -> str:
        """Returns the nodes and the values between them in Graphviz's language, for ``dot``."""
        return graphviz_text(self.trace)


def explain(
    model: Layer,
    example_inputs: Inputs,
    no_split: Sequence[type | str] = (),
    measure: bool = False,
    shape_inputs: Sequence[str | int] = (),
) -> Explanation:
    """Captures a model, and returns a printable explanation of it.

    Args:
        model: Any layer, which is not changed.
        example_inputs: As for :func:`fleetpipe.pipeline`.
        no_split: Classes of layers, or their names, each of which is a single node.
        measure: Whether to measure how long each node takes.
        shape_inputs: As for :func:`fleetpipe.pipeline`.

    Raises:
        CaptureError: The model cannot be captured.
        ConfigError: ``no_split`` names a class that no sublayer has.
        UsageError: ``model`` is no built layer, or a pipeline already.
    """
    kinds = resolve_no_split(require_plain_model(model), no_split)
    example = fill_input_specs(example_inputs, ROWS)
    require_whole(example, shape_inputs)
    capturer = Capturer(model, example, kinds, shape_inputs=shape_inputs)
    require_same_calls(capturer)
    signature = capturer.example_signature
    training, evaluation = capturer(signature, training=True), capturer(signature, training=False)
    named, refused = find_cut_points(training, evaluation)
    return Explanation(
        training,
        named,
        refused,
        training.live_bytes,
        parameter_bytes(training),
        training.unopened,
        measure_nodes(capturer, training, named).layers[1:-1] if measure else None,
    )


def graphviz_text(trace: Capture, starts: Sequence[int] = ()) -> str:
    """Returns the nodes of a run and the values between them as a graph for ``dot -Tsvg``.

    Nodes have the colour of their stage. A value that crosses to another stage is a red arrow,
    drawn once for that stage, with its bytes.

    Args:
        trace: A run of the forward.
        starts: The number of the first node of each stage after stage 0; empty for a model that is
            not cut.
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
    """Yields the line of an arrow in Graphviz's language for each use of a value by a node."""
    uses = [(f"n{number}", number, sorted(node.uses)) for number, node in enumerate(trace.nodes)]
    uses.append(("outputs", len(trace.nodes), list(trace.output_values)))
    crossed: set[tuple[ValueId, int]] = set()
    for target, number, values in uses:
        stage = bisect_right(starts, number)
        for value in values:
            maker, spec = trace.maker(value), trace.specs[value]
            source = "inputs" if maker is None else f"n{maker}"
            source_stage = 0 if maker is None else bisect_right(starts, maker)
            label, colour = str(spec), ""
            if source_stage != stage and (value, stage) not in crossed:
                crossed.add((value, stage))
                label, colour = f"{label}, {spec.nbytes:,} bytes", ', color="#b00020"'
            yield f"  {source} -> {target} [label={_quote(label)}{colour}];"


def _quote(text: str) -> str:
    return '"' + text.replace('"', "'") + '"'

"""The runs of a forward that a pipeline knows, by what a batch looks like and by mode, each cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Callable, NamedTuple

from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.cutting import cuts
from fleetpipe.capture.cutting.cuts import Border
from fleetpipe.capture.cutting.edges import crossing
from fleetpipe.capture.running.replay import entries
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.python_state import python_state_kept
from fleetpipe.capture.tracing.signature import Signature, signature_of
from fleetpipe.capture.tracing.value import Node, Trace
from fleetpipe.dygraph.layers.run_stage import StageRunner
from fleetpipe.errors import CaptureError
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.schedules import Edge


class Form(NamedTuple):
    """One run of the forward, cut.

    Attributes:
        trace: The run.
        starts: The first node of each stage but stage 0.
        functions: What runs the nodes, between what takes the inputs and what gives the outputs.
        runner: Runs the stages.
        crossing: The values on each edge, by name.
    """

    trace: Trace
    starts: tuple[int, ...]
    functions: Sequence[Callable[[Nest], Nest]]
    runner: StageRunner
    crossing: dict[Edge, tuple[str, ...]]

    def nodes(self, stage: int) -> Sequence[Node]:
        """Returns the nodes of a stage."""
        bounds = [0, *self.starts, len(self.trace.nodes)]
        return self.trace.nodes[bounds[stage] : bounds[stage + 1]]

    def layers(self, stage: int) -> dict[int, Layer]:
        """Returns the layers that are nodes of a stage, each by the number of its first call.

        Numbers are those of ``functions``, of which the first takes the inputs.
        """
        first = self.starts[stage - 1] if stage else 0
        layers: dict[int, tuple[int, Layer]] = {}
        for number, node in enumerate(self.nodes(stage), first + 1):
            if node.is_layer:
                layers.setdefault(id(node.function), (number, node.function))
        return dict(layers.values())


class Forms:
    """Makes them when they are asked for, and keeps them."""

    def __init__(
        self,
        capturing: Capturing,
        borders: Sequence[Border],
        interval: int = 0,
        recompute: Collection[int] = (),
    ) -> None:
        """Begins with the look of the example, in both modes.

        Args:
            capturing: Runs the forward. The edges of its example are those of the pipeline.
            borders: Where it is cut.
            interval: Nodes of a stage that are recomputed as one; 0 for none.
            recompute: Functions of which each is recomputed by itself, by their numbers.
        """
        self.capturing = capturing
        self._borders = borders
        self._interval, self._recompute = interval, recompute
        self.first = signature_of(capturing.example)
        self.stages = len(borders) + 1
        self._known: dict[tuple[Signature, bool], Form] = {}
        for training in (True, False):
            self._known[self.first, training] = self._made(self.first, training)

    def of(self, signature: Signature, training: bool) -> Form:
        """Returns how a batch of a look is run.

        Raises:
            CaptureError: It crosses between stages where the example does not.
        """
        form = self._known.get((signature, training))
        if form is None:
            form = self._made(signature, training)
            new = form.crossing.keys() - self.example(training).crossing.keys()
            if new:
                raise CaptureError(
                    "a batch of this look has a value on an edge that the example has not",
                    expected=f"inputs like {self.first}",
                    got=f"{signature}, with the edges {', '.join(map(str, sorted(new)))}",
                    fix="pass example_inputs in which everything is given that may be",
                )
            self._known[signature, training] = form
        return form

    def example(self, training: bool) -> Form:
        """Returns how the example is run."""
        return self._known[self.first, training]

    def _made(self, signature: Signature, training: bool) -> Form:
        with python_state_kept(self.capturing.model):
            trace = self.capturing(signature, training)
        starts = tuple(cuts.starts(trace, self._borders))
        functions = entries(trace, signature)
        infos = tuple(LayerInfo(str(getattr(f, "__name__", ""))) for f in functions)
        bounds = (0, *(start + 1 for start in starts), len(functions))
        partition = Partition(bounds, "captured", infos)
        runner = StageRunner(dict(enumerate(functions)), partition, self._interval, self._recompute)
        return Form(trace, starts, functions, runner, crossing(trace, starts))

"""Runs the stages of a captured model, each micro-batch by the run that was captured for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetpipe.aliases import Nest
from fleetpipe.capture.running.replay import LOOK, SAMPLE
from fleetpipe.capture.running.variants import Form, Forms
from fleetpipe.capture.tracing.capturing import FirstBatch
from fleetpipe.capture.tracing.signature import Signature, complete
from fleetpipe.dygraph.layers.run_stage import Run
from fleetpipe.engine.stage import Values
from fleetpipe.schedules import Edge
from fleetpipe.schedules.action import GlobalMicroBatch


class CapturedStages:
    """Runs the stages, and says what crosses between them: the ``Borders`` of dygraph's stage."""

    def __init__(self, forms: Forms, training: Callable[[], bool]) -> None:
        """Takes the captured runs."""
        self._forms = forms
        self._training = training

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between the stages, in training or in evaluation."""
        return tuple(self._forms.example(training).crossing)

    def function(self, stage: int) -> Run:
        """Returns the function that runs the nodes of a stage in the current mode."""

        def run(value: Nest, micro_batch: GlobalMicroBatch | None) -> Nest:
            form, value = self.form(stage, value)
            form.renew(stage)
            output = form.runner.function(stage)(value, micro_batch)
            for mode in form.trace.switched:
                mode.put_back()
            return output

        return run

    def form(self, stage: int, value: Nest) -> tuple[Form, Nest]:
        """Returns the captured run for a value that came to a stage, and its first node's input."""
        forms = self._forms
        if stage:
            look = value.get(LOOK, forms.first)
            if SAMPLE in value:
                forms.capturing.samples.setdefault(look, FirstBatch(value[SAMPLE], set()))
        else:
            value = complete(value, forms.capturing.example)
            look = forms.capturing.look_of(value)
        return forms.of(look, self._training()), value

    def join(self, values: Values) -> Nest:
        """Returns all values that came to a stage, by name."""
        return {name: tensor for part in values.values() for name, tensor in part.items()}

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the values that leave a stage on each edge, by name, with the batch's look."""
        look: Signature = output[LOOK]
        first = {LOOK: look}
        sample = self._forms.capturing.samples.get(look)
        if sample is not None and stage not in sample.stages:
            sample.stages.add(stage)
            first[SAMPLE] = sample.text
        training = self._training()
        crossing = self._forms.of(look, training).crossing
        return {
            edge: {**first, **{name: output[name] for name in crossing.get(edge, ())}}
            for edge in self.edges(training)
            if edge.source == stage
        }

"""Where a right pipeline adds gradients up in another order than one graph does, and so rounds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from fleetpipe.dygraph import Crossing, PipelineParallel, reordered
from fleetpipe.job.job import all_ranks
from fleetpipe.parity.report import Report

#: Largest relative difference that passes where sums have another order.
ROUNDING = 1e-5


class Orders:
    """Looks for such places, in the first steps and whenever other parameters are trained."""

    def __init__(self, pipeline: PipelineParallel, report: Report) -> None:
        """Begins before the first step.

        Args:
            pipeline: The wrapped model.
            report: Gets the reasons, and the tolerance where there are any.
        """
        self._pipeline, self._report = pipeline, report
        self._trained: frozenset[str] = frozenset()

    def crossings(self) -> AbstractContextManager[dict[int, Crossing]]:
        """Within it the graphs of the pipeline's stages are followed, if need be. Collective."""
        parameters = self._pipeline.layers.named_parameters()
        before = self._trained
        self._trained = frozenset(name for name, p in parameters if not p.stop_gradient)
        changed = any(all_ranks().all_gather(self._trained != before))
        # In its first run a stage has a graph of its own: it finds out what it has to copy.
        return self._pipeline.crossings() if changed or self._report.steps < 2 else nullcontext({})

    def note(self, crossings: Mapping[int, Crossing]) -> None:
        """Lets rounding pass where the pipeline adds up in another order. Collective.

        Args:
            crossings: What :meth:`crossings` found on the stages of this process.
        """
        report = self._report
        plain = [(stage, crossing.plain()) for stage, crossing in crossings.items()]
        parts = all_ranks().all_gather((plain, self._pipeline.reordered_leaves()))
        everything = {stage: Crossing.from_plain(c) for part, _ in parts for stage, c in part}
        reasons = [
            f"stage {stage} hands on several tensors, whose gradients meet others'"
            for stage in reordered(everything)
        ]
        leaves = sorted({name for _, names in parts for name in names})
        reasons += [f"the backward of layer {name} is split" for name in leaves]
        report.orders += [reason for reason in reasons if reason not in report.orders]
        if report.orders:
            report.tolerance = max(report.tolerance, ROUNDING)

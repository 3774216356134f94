"""Finds gradients that the stages add up in another order than the plain model."""

from __future__ import annotations

from fleetpipe.capture.cutting.node_meter import state_of
from fleetpipe.capture.running.variants import Forms


def reordered_sums(forms: Forms) -> tuple[str, ...]:
    """Names the values and parameters whose gradients the stages sum in another order.

    Each stage adds up its own uses first. Two uses of a value make the same sum in any order, but
    the sum of a parameter continues from micro-batch to micro-batch.
    """
    form = forms.example(training=True)
    names = {id(p): name for name, p in forms.capturing.model.named_parameters()}
    weights: dict[str, set[int]] = {}
    values: dict[str, list[int]] = {}
    for stage in range(len(form.starts) + 1):
        for node in form.nodes(stage):
            for tensor in state_of(node):
                if not tensor.stop_gradient and id(tensor) in names:
                    weights.setdefault(names[id(tensor)], set()).add(stage)
            for value in node.uses:
                maker = form.trace.maker(value)
                if maker is not None and form.trace.likes[value].dtype.startswith(("f", "b")):
                    values.setdefault(form.trace.nodes[maker].name, []).append(stage)
    return (
        *(name for name, stages in weights.items() if len(stages) > 1),
        *(name for name, at in values.items() if len(at) > 2 and len({*at}) > 1),
    )

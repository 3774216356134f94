"""The model to train: a transformer in a few figures, or a profile of measured layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fleetpipe.contrib.clusters.cluster import Cluster
from fleetpipe.contrib.clusters.layout import JobLayout
from fleetpipe.contrib.clusters.transformer import SOURCE, Transformer
from fleetpipe.errors import ConfigError
from fleetpipe.json_value import JsonValue, read
from fleetpipe.profiling.cost_model import LayerCost
from fleetpipe.profiling.profile import Profile


@dataclass(frozen=True)
class MeasuredModel:
    """A profile of measured layers, scaled to faster devices.

    Times scale with the FLOP/s of a product and with sequences of a micro-batch, bytes of
    activations with the latter. No layer can be split among ranks.

    Attributes:
        profile: The measured profile.
        rows: Sequences (or samples) of the micro-batch that was measured.
        dtype: The dtype of its products on the cluster.
    """

    profile: Profile
    rows: int = 1
    dtype: str = "float32"

    def fits(self, layout: JobLayout) -> bool:
        """Whether no layer is split; layers whose savings are known may be recomputed."""
        layers = self.profile.layers
        whole = layout.tensor == layout.context == layout.expert == 1
        saves = layout.recompute == "full" and any(layer.saved for layer in layers)
        return whole and (layout.recompute == "none" or saves)

    def costs(self, layout: JobLayout, cluster: Cluster) -> tuple[LayerCost, ...]:
        """Returns the measured layers, scaled; the loss is the last of them.

        Raises:
            ConfigError: The cluster lacks the speed of the profiled machine.
        """
        if cluster.profiled is None:
            raise ConfigError(
                "the cluster does not say how fast the machine was that the profile is of",
                expected="`profiled`: FLOP/s that a product sustained there",
                got="none",
                fix="add `profiled`, such as 1e11; fleetpipe cannot compare two devices otherwise",
            )
        rows = layout.micro_batch / self.rows
        edge = 4096
        seconds = cluster.product(self.dtype, edge, edge, edge)
        faster = rows * seconds * cluster.profiled / (2 * edge**3)
        layers = [*self.profile.layers, *filter(None, [self.profile.loss])]
        return tuple(_scale(layer, faster, rows, layout.recompute) for layer in layers)

    def forward_flops(self) -> float:
        """Returns 0: a profile has no FLOPs."""
        return 0.0


def _scale(layer: LayerCost, faster: float, rows: float, recompute: str) -> LayerCost:
    """Returns a layer's costs with times multiplied by ``faster`` and bytes by ``rows``.

    With ``recompute="full"`` its forward runs once more in backward, if that saves memory.
    """
    again = layer.forward if recompute == "full" and layer.saved else 0.0
    # What is recomputed is not in memory between forward and backward.
    freed, split = (layer.saved, layer.saved_split) if again else (0, 0)
    input_grad, weight_grad = layer.input_grad, layer.weight_grad
    return replace(
        layer,
        forward=layer.forward * faster,
        backward=(layer.whole + again) * faster,
        input_grad=None if input_grad is None else (input_grad + again) * faster,
        weight_grad=None if weight_grad is None else weight_grad * faster,
        output=int(layer.output * rows),
        held=int((layer.held - freed) * rows),
        held_split=int((layer.held_split - split) * rows),
        waiting=int(layer.waiting * rows),
        working=int((layer.working + freed) * rows),
        releases=int(layer.releases * rows),
        saved=0,
    )


#: What may be trained.
Workload = Transformer | MeasuredModel


def read_model(path: str | Path) -> Workload:
    """Reads a model: ``{"transformer": {..}}``, as JSON or TOML, or a profile.

    The file of a profile may also have the ``rows`` of the measured micro-batch, and the ``dtype``
    to run in.

    Raises:
        ConfigError: It is neither of them, or a figure is missing or impossible.
    """
    return read(path, SOURCE, _model)


def _model(content: JsonValue) -> Workload:
    if "transformer" in content.fields():
        content.require_names(["transformer"])
        return Transformer.of(content["transformer"])
    if "profile" not in content.fields():
        raise content.refused("an object with 'transformer' or 'profile'")
    rows, dtype = content.get("rows"), content.get("dtype")
    return MeasuredModel(
        Profile.of(content),
        1 if rows is None else max(rows.count(), 1),
        "float32" if dtype is None else dtype.text(),
    )

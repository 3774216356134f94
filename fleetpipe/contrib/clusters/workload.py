"""Describes the model to train: a ``Transformer`` by its sizes, or a profile of measured layers.

Matrix products run at the cluster's FLOP/s, all else at the bandwidth of a device's memory. In
passes over a tensor, norms, residuals and dropout take 12 over a block's input; biases and layouts
4 over queries, keys and values; the feed-forward 2 over its activations, 3 with a gate; attention 6
over its scores if they are stored, else 4 over its output. A backward takes as many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fleetpipe.contrib.clusters.cluster import Cluster, JobLayout
from fleetpipe.errors import ConfigError
from fleetpipe.json_value import JsonValue, Source, read
from fleetpipe.profiling.cost_model import LayerCost
from fleetpipe.profiling.profile import Profile

#: Bytes of an element, by dtype.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}

#: What a backward computes again: nothing, attention, or all of the forward.
RECOMPUTES = ("none", "selective", "full")

#: Bytes of an element of gradients and of the optimizer's tensors, which are float32.
_GRADIENT_BYTES = 4

#: Bytes of memory traffic for each logit, forward and backward: it is float32, as is its softmax.
_LOGIT_TRAFFIC = (16, 8)

SOURCE = Source(
    "this describes no model",
    ConfigError,
    "write layers, hidden, heads, vocabulary and sequence of a transformer, as docs/estimate.md"
    " shows, or measure a profile with fleetpipe profile",
)


@dataclass(frozen=True)
class Transformer:
    """A decoder of blocks that are all alike.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the activations between blocks.
        heads: Number of heads of attention.
        vocabulary: Size of the vocabulary.
        sequence: Tokens of a sequence.
        kv_heads: Heads of keys and values; None: as many as ``heads``.
        feed_forward: Width of the feed-forward; None: four times ``hidden``.
        gated: Whether the feed-forward has a gate: three matrices, not two.
        flash: Whether attention stores no scores, and skips the positions that its causal mask
            hides.
        experts: Experts of a block; 0 for none.
        active_experts: Experts that a token passes through.
        dtype: The dtype of products, activations and parameters.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int | None = None
    feed_forward: int | None = None
    gated: bool = False
    flash: bool = True
    experts: int = 0
    active_experts: int = 0
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, content: JsonValue) -> Transformer:
        """Reads the table ``transformer`` of a file.

        Raises:
            ConfigError: A figure is missing, unknown, or does not fit the others.
        """
        switches = {"gated": _read_bool, "flash": _read_bool, "dtype": JsonValue.text}
        model = content.record(cls, JsonValue.count, **switches)
        sizes = (model.layers, model.hidden, model.heads, model.vocabulary, model.sequence)
        groups = model.heads if model.kv_heads is None else model.kv_heads
        for is_broken, rule in (
            (0 in (*sizes, groups), "sizes of 1 or more"),
            (model.hidden % (model.heads or 1), "hidden that heads divides"),
            (model.heads % (groups or 1), "heads that kv_heads divides"),
            (model.dtype not in ITEM_BYTES, f"a dtype of {', '.join(ITEM_BYTES)}"),
            (
                model.experts and not 0 < model.active_experts <= model.experts,
                "active_experts from 1 to experts",
            ),
        ):
            if is_broken:
                raise content.refused(rule)
        return model

    @property
    def query(self) -> float:
        """Width of queries, keys and values together."""
        return self.hidden * (1 + 2 * (self.kv_heads or self.heads) / self.heads)

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return self.feed_forward or 4 * self.hidden

    @property
    def feed_forwards_of_token(self) -> int:
        """Number of feed-forwards that a token passes through."""
        return max(self.active_experts, 1)

    @property
    def attention_parameters(self) -> float:
        """Parameters of a block's attention."""
        return self.hidden * (self.query + self.hidden)

    @property
    def expert_parameters(self) -> float:
        """Parameters of a feed-forward."""
        return (3 if self.gated else 2) * self.hidden * self.inner

    def fits(self, layout: JobLayout) -> bool:
        """Returns whether a layout splits heads, tokens and experts evenly, and recompute helps.

        Selective recompute frees the scores of attention, which ``flash`` does not store anyway.
        """
        if self.flash and layout.recompute == "selective":
            return False
        divides_heads = self.heads % layout.tensor == 0
        divides_tokens = self.sequence % layout.context == 0
        return divides_heads and divides_tokens and max(self.experts, 1) % layout.expert == 0

    def forward_flops(self) -> float:
        """Returns the FLOPs of products in the forward of a sequence, the head included."""
        weights = self.attention_parameters + self.feed_forwards_of_token * self.expert_parameters
        scores = 4 * self.sequence * self.hidden / (2 if self.flash else 1)
        blocks = self.layers * (2 * weights + scores)
        return self.sequence * (blocks + 2 * self.hidden * self.vocabulary)

    def costs(self, layout: JobLayout, cluster: Cluster) -> tuple[LayerCost, ...]:
        """Returns each layer's costs on a rank for one micro-batch: embedding, blocks, head."""
        embedding, block, head = _layer_costs(self, layout.of_layers, cluster)
        return (embedding, *[block] * self.layers, head)


@lru_cache(maxsize=4096)
def _layer_costs(
    model: Transformer, layout: JobLayout, cluster: Cluster
) -> tuple[LayerCost, LayerCost, LayerCost]:
    """Returns the costs of the embedding, of a block and of the head on one rank."""
    costs = _CostsOnOneRank(model, layout, cluster)
    return costs.embedding(), costs.block(), costs.head()


class _CostsOnOneRank:
    """Computes what each layer costs one rank for one micro-batch.

    Attributes:
        model: The whole model.
        layout: How the job is split among ranks.
        cluster: The cluster that it runs on.
        tokens: The tokens of a micro-batch on this rank.
        width: Bytes of an element.
        value: Bytes of a tensor [tokens, hidden].
        shared: ``value``, under sequence parallelism divided by the number of ``tensor`` ranks.
        scores: Number of this rank's scores of attention.
        query: Bytes of this rank's queries, keys and values.
        inner: Bytes of this rank's activations of width ``model.inner`` in the feed-forwards.
    """

    def __init__(self, model: Transformer, layout: JobLayout, cluster: Cluster) -> None:
        self.model, self.layout, self.cluster = model, layout, cluster
        self.tokens = layout.micro_batch * model.sequence / layout.context
        self.width = ITEM_BYTES[model.dtype]
        self.value = self.width * self.tokens * model.hidden
        self.shared = self.value / (layout.tensor if layout.sequence_parallel else 1)
        pairs = layout.micro_batch * model.heads * model.sequence**2
        self.scores = pairs / (layout.tensor * layout.context)
        self.query = self.width * self.tokens * model.query / layout.tensor
        self.inner = (
            self.width * self.tokens * model.feed_forwards_of_token * model.inner / layout.tensor
        )

    def block(self) -> LayerCost:
        """Returns the costs of a transformer block on one rank, for one micro-batch."""
        model, layout = self.model, self.layout
        halves = 3 if model.gated else 2
        passes = 12 * self.shared + 4 * self.query + halves * self.inner
        products = self._weight_product_seconds()
        forward = products + self.cluster.traffic(passes) + self._exchange_seconds()
        # Backward gathers keys and values again, and scatters their gradients.
        backward = forward + self._gather_seconds() + self._attention_seconds(2)
        forward += self._attention_seconds(1)
        # The inputs of norms, products and activations, and the masks of dropouts.
        linear = 5 * self.shared + self.query + self.value / layout.tensor + halves * self.inner
        scores = 0.0 if model.flash else (2 * self.width + 1) * self.scores
        held = {"none": linear + scores, "selective": linear, "full": self.shared}[layout.recompute]
        repeated = {"none": 0.0, "selective": self._attention_seconds(1), "full": forward}
        experts = max(model.experts, 1) / layout.expert
        parameters = model.attention_parameters + experts * model.expert_parameters
        return self._layer_cost(
            "Block",
            (forward, backward + repeated[layout.recompute], products),
            parameters,
            held,
            output=self.shared,
            waiting=2 * self.shared + self.query + 2 * self.inner,
            working=linear + scores - held + self.shared,
        )

    def embedding(self) -> LayerCost:
        """Returns the costs of the embedding on one rank, for one micro-batch."""
        seconds = self.cluster.traffic(4 * self.value)
        parameters = self.model.vocabulary * self.model.hidden
        times = (seconds, 0.0, seconds)
        return self._layer_cost("Embedding", times, parameters, self.shared, output=self.shared)

    def head(self) -> LayerCost:
        """Returns the costs of the head and the loss on one rank, for one micro-batch."""
        model, columns = self.model, self.model.vocabulary / self.layout.tensor
        product = self.cluster.product(model.dtype, self.tokens, columns, model.hidden)
        logits = self.tokens * columns
        forward, backward = (product + self.cluster.traffic(logits * n) for n in _LOGIT_TRAFFIC)
        held = self.value + 4 * logits
        return self._layer_cost(
            *("Head", (forward, backward, product), model.vocabulary * model.hidden, held),
            waiting=held,
            working=self.width * logits,
        )

    def _layer_cost(
        self,
        name: str,
        times: tuple[float, float, float],
        parameters: float,
        held: float,
        *,
        output: float = 0,
        waiting: float = 0,
        working: float = 0,
    ) -> LayerCost:
        """Returns a layer's costs for the cost model.

        Args:
            name: The layer's name.
            times: Seconds of forward, input-gradient and weight-gradient.
            parameters: The number of parameters on all ranks of ``tensor``.
            held: Bytes that the forward saves for the backward.
            output: Bytes of the output.
            waiting: Bytes that the input-gradient saves for the weight-gradient.
            working: Bytes that an action uses while it runs.
        """
        forward, input_grad, weight_grad = times
        part = parameters / self.layout.tensor
        return LayerCost(
            name,
            forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            parameters=int(part * self.width),
            gradients=int(part * _GRADIENT_BYTES),
            output=int(output),
            held=int(held),
            held_split=int(held),
            waiting=int(waiting),
            working=int(working),
        )

    def _weight_product_seconds(self) -> float:
        """Returns the seconds of the products with a block's weight matrices, forward."""
        model, tensor = self.model, self.layout.tensor

        def product(rows: float, columns: float, inner: float) -> float:
            return self.cluster.product(model.dtype, rows, columns, inner)

        seconds = product(self.tokens, model.query / tensor, model.hidden)
        seconds += product(self.tokens, model.hidden, model.hidden / tensor)
        # An expert sees the tokens of all ranks that share the experts.
        experts = max(model.experts, 1) / self.layout.expert
        rows = self.tokens * model.feed_forwards_of_token / experts
        up_matrices = 2 if model.gated else 1
        seconds += experts * product(rows, up_matrices * model.inner / tensor, model.hidden)
        return seconds + experts * product(rows, model.hidden, model.inner / tensor)

    def _attention_seconds(self, times: int) -> float:
        """Returns the seconds of a block's attention beside the products with its weights.

        ``times`` is 1 for a forward, and 2 for a backward, which computes twice as much.
        """
        model, layout = self.model, self.layout
        rows, head_size = model.sequence / layout.context, model.hidden / model.heads
        count = 2 * times * layout.micro_batch * model.heads / layout.tensor
        seconds = count * self.cluster.product(model.dtype, rows, model.sequence, head_size)
        if model.flash:
            return seconds / 2 + self.cluster.traffic(4 * self.value / layout.tensor)
        return seconds + self.cluster.traffic(6 * self.width * self.scores)

    def _exchange_seconds(self) -> float:
        """Returns the seconds of a block's exchanges between ranks in a forward, or a backward.

        These are two all-reduces over ``tensor``, the way of tokens to experts and back, and the
        gathering of keys and values.
        """
        layout, cluster = self.layout, self.cluster
        experts = (layout.expert, layout.tensor * layout.context)
        sent = self.value * self.model.active_experts / layout.tensor
        reduces = 2 * cluster.reduce(self.value, (layout.tensor, 1))
        return reduces + 2 * cluster.exchange(sent, experts) + self._gather_seconds()

    def _gather_seconds(self) -> float:
        """Returns the seconds in which a rank gathers the keys and values of other cp ranks."""
        layout = self.layout
        size = (self.query - self.value / layout.tensor) * layout.context
        return self.cluster.gather(size, (layout.context, layout.tensor))


def _read_bool(value: JsonValue) -> bool:
    if not isinstance(value.content, bool):
        raise value.refused("true or false")
    return value.content


@dataclass(frozen=True)
class MeasuredModel:
    """A profile of measured layers, scaled to faster devices.

    Times scale with the FLOP/s of a product and the sequences of a micro-batch; bytes of
    activations scale with the sequences. No layer can be split among ranks.

    Attributes:
        profile: The measured profile.
        rows: Sequences (or samples) of the micro-batch that was measured.
        dtype: The dtype of the model's products on the cluster.
    """

    profile: Profile
    rows: int = 1
    dtype: str = "float32"

    def fits(self, layout: JobLayout) -> bool:
        """Returns whether a layout leaves layers whole, and its recompute saves memory.

        What full recompute saves is known only of layers that were measured with it.
        """
        layers = self.profile.layers
        leaves_whole = layout.tensor == layout.context == layout.expert == 1
        saves = layout.recompute == "full" and any(layer.saved for layer in layers)
        return leaves_whole and (layout.recompute == "none" or saves)

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
        edge = 4096  # of the square matrices by which the two devices are compared
        seconds = cluster.product(self.dtype, edge, edge, edge)
        time_factor = rows * seconds * cluster.profiled / (2 * edge**3)
        layers = [*self.profile.layers, *filter(None, [self.profile.loss])]
        return tuple(_scale_layer(layer, time_factor, rows, layout.recompute) for layer in layers)

    def forward_flops(self) -> float:
        """Returns 0: a profile has no FLOPs."""
        return 0.0


def _scale_layer(layer: LayerCost, time_factor: float, rows: float, recompute: str) -> LayerCost:
    """Returns a layer's costs with times multiplied by ``time_factor``, and bytes by ``rows``.

    With ``recompute="full"`` the layer's forward runs once more in backward, if that saves memory.
    """
    repeated = layer.forward if recompute == "full" and layer.saved else 0.0
    # Recomputed activations are not in memory between forward and backward.
    freed, freed_split = (layer.saved, layer.saved_split) if repeated else (0, 0)
    input_grad, weight_grad = layer.input_grad, layer.weight_grad
    return replace(
        layer,
        forward=layer.forward * time_factor,
        backward=(layer.whole + repeated) * time_factor,
        input_grad=None if input_grad is None else (input_grad + repeated) * time_factor,
        weight_grad=None if weight_grad is None else weight_grad * time_factor,
        output=int(layer.output * rows),
        held=int((layer.held - freed) * rows),
        held_split=int((layer.held_split - freed_split) * rows),
        waiting=int(layer.waiting * rows),
        working=int((layer.working + freed) * rows),
        releases=int(layer.releases * rows),
        saved=0,
    )


#: A model to train, by either description.
Workload = Transformer | MeasuredModel


def read_model(path: str | Path) -> Workload:
    """Reads a model: ``{"transformer": {..}}``, as JSON or TOML, or a profile.

    A profile may also have the ``rows`` of the measured micro-batch, and the ``dtype`` to run in.

    Raises:
        ConfigError: The file is neither of these, or a figure is missing or impossible.
    """
    return read(path, SOURCE, _read_content)


def _read_content(content: JsonValue) -> Workload:
    """Reads a model from the content of its file: a transformer's sizes, or a profile."""
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

"""A head over a large vocabulary, of which each rank of a pipeline has a part.

With hidden values x [rows, hidden] and the rows W_r [vocabulary / p, hidden] of part r, its logits
are z_r = x W_r^T (or x W_r, if it has columns of a Linear), plus its bias b_r [vocabulary / p] if
it has one. For each row a part returns only three numbers: log(sum(exp(z_r))); the label's logit,
or 0 if the label is in another part; and whether it is in this part. The loss of a row is the
logarithm of the summed exponentials of the first, less the sum of the second.

A pipeline computes each part on a rank of its own. A single process has all parts, and computes
each with the same products and sums, but only when the loss needs it: until then the logits are
deferred. ``captured.py`` puts a head in the place of a captured model's last Linear.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Context, Layer, Nest, Tensor
from fleetpipe.dygraph.batch.units import Chain
from fleetpipe.dygraph.layers.entries import SeveralLayers
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.dygraph.state.files import LayerInParts
from fleetpipe.engine.stage import Values
from fleetpipe.errors import BoundaryError, ConfigError, require_whole
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.parts import PartOfWhole, Region
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.eager_operations import mean_leaves_out_below_zero
from fleetpipe.paddle_api.tensor import to_host
from fleetpipe.representation import shows
from fleetpipe.schedules import Placement

__all__ = ["VocabularyEmbedding", "VocabularyHead", "VocabularyLoss", "vocabulary_cross_entropy"]


# Typed: Paddle's own is not.
_multiply: Callable[..., Tensor] = paddle.matmul

_LayerDesc: Callable[..., Any] = paddle_fleet.meta_parallel.LayerDesc
_SharedLayerDesc: Callable[..., Any] = paddle_fleet.meta_parallel.SharedLayerDesc


@shows("hidden", "vocabulary", "tied")
class _HeadDescription(SeveralLayers):
    """The description of a head or embedding in a list of layers, before it is split over ranks.

    A ``PipelineLayer`` replaces it by the result of :meth:`layers`, which hold parts of the
    vocabulary.
    """

    #: The axis of the vocabulary in the full weights.
    axis = 0

    def __init__(self, hidden: int, vocabulary: int, weight_attr: Any, tied: str | None) -> None:
        for name, size in (("hidden", hidden), ("vocabulary", vocabulary)):
            rule = f"{name} of a {type(self).__name__} is a number of 1 or more"
            fix = "give the whole number that the layers before it, or the labels, have"
            require_whole(name, size, rule=rule, fix=fix)
        self.hidden, self.vocabulary = hidden, vocabulary
        self.weight_attr, self.tied = weight_attr, tied

    def __call__(self, _value: Nest) -> Nest:
        """Raises ConfigError: a description is no layer."""
        raise ConfigError(
            f"a {type(self).__name__} is a description, which only a PipelineLayer builds",
            fix="make it an entry of the list of layers of a PipelineLayer",
        )

    def parts(self, ranks: int) -> list[PartOfWhole]:
        """Returns the part of the weights that each rank of the pipeline holds, by rank.

        Raises:
            ConfigError: There are fewer classes than ranks.
        """
        if self.vocabulary < ranks:
            raise ConfigError(
                "each rank holds a part of the vocabulary",
                expected=f"{ranks} classes or more",
                got=f"{type(self).__name__}(vocabulary={self.vocabulary})",
                fix="describe so small a head as a layer like the others",
            )
        bounds = [part * self.vocabulary // ranks for part in range(ranks + 1)]
        return [
            PartOfWhole(part, Region(self.axis, first, last, self.vocabulary))
            for part, (first, last) in enumerate(itertools.pairwise(bounds))
        ]


class VocabularyHead(_HeadDescription):
    """Describes the last entry of a list of layers: the product with a vocabulary, in parts.

    Each rank of the pipeline holds the weights of one part, [vocabulary / p, hidden]. The loss
    function passes the model's output to :func:`vocabulary_cross_entropy`.

    Args:
        hidden: The size of a row of the input, [.., hidden].
        vocabulary: The number of classes.
        weight_attr: The ``ParamAttr`` of the weights of each part.
        tied: The key of the :class:`VocabularyEmbedding` whose weights the head shares; None if it
            shares none.
        bias_attr: The ``ParamAttr`` of the bias of each part; None for Paddle's default; False for
            no bias, which a tied head requires.

    Raises:
        ConfigError: A tied head has a bias.
    """

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        weight_attr: Any = None,
        tied: str | None = None,
        bias_attr: Any = False,
    ) -> None:
        super().__init__(hidden, vocabulary, weight_attr, tied)
        self.bias_attr = bias_attr
        if tied is not None and bias_attr is not False:
            raise ConfigError(
                "a head tied to the embedding has its weights, and no bias",
                got=f"tied={tied!r}, bias_attr={bias_attr!r}",
                fix="leave bias_attr out, or tied for weights of its own",
            )

    def require_place(self, entries: Sequence[Any], index: int) -> None:
        """Raises ConfigError if the head is not the last entry, or tied to an unknown embedding.

        Args:
            entries: The list of layers.
            index: The position of this head in it.
        """
        keys = [entry.tied for entry in entries if isinstance(entry, VocabularyEmbedding)]
        if index + 1 < len(entries):
            raise ConfigError(
                "a VocabularyHead is the last entry of a list of layers",
                where=f"layer {index} of {len(entries)}",
                fix="put it at the end, and what follows into the loss function",
            )
        if self.tied not in (None, *keys):
            raise ConfigError(
                "a tied VocabularyHead names the key of a VocabularyEmbedding",
                expected=", ".join(map(repr, keys)) or "one in the list of layers",
                got=f"tied={self.tied!r}",
                fix="give both the same key, or leave tied out",
            )

    def layers(self, ranks: int) -> list[Any]:
        """Returns the layers that replace the head: a part for each rank, and the loss."""
        parts: list[Any] = []
        for part in self.parts(ranks):
            arguments = self.hidden, part, self.weight_attr
            if self.tied is None:
                parts.append(_LayerDesc(VocabularyPart, *arguments, self.bias_attr))
            else:
                name = _part_name(part.number)
                shared = _SharedLayerDesc(
                    *(self.tied, VocabularyPart, None, [name], *arguments, False, name)
                )
                parts.append(shared)
        return [*parts, vocabulary_loss]


class VocabularyEmbedding(_HeadDescription):
    """Describes an embedding to which a :class:`VocabularyHead` may be tied.

    The embedding's rank holds all rows, as one parameter for each part; every other rank has a copy
    of its part.

    Args:
        key: The key that the head gives as ``tied``.
        hidden: The size of a row.
        vocabulary: The number of rows.
        weight_attr: The ``ParamAttr`` of the weights of each part.
    """

    def __init__(self, key: str, hidden: int, vocabulary: int, weight_attr: Any = None) -> None:
        super().__init__(hidden, vocabulary, weight_attr, key)

    def layers(self, ranks: int) -> list[Any]:
        """Returns the layer that replaces the embedding."""
        parts = self.parts(ranks)
        names = [_part_name(part.number) for part in parts]
        arguments = self.hidden, parts, self.weight_attr
        return [_SharedLayerDesc(self.tied, EmbeddingInParts, None, names, *arguments)]


def _part_name(part: int) -> str:
    """Returns the name of the shared weights of a part."""
    return f"part{part}"


def _mark_part(parameter: Tensor, part: PartOfWhole) -> Tensor:
    """Marks a parameter as a part of a full tensor, which checkpoints save; returns it."""
    parameter.part_of_whole = part
    return parameter


class DeferredLogits(NamedTuple):
    """The output of a whole model in one process: the loss computes the logits from it.

    Attributes:
        hidden: The input of the head, [.., hidden].
        parts: The parts of the head.
    """

    hidden: Tensor
    parts: tuple[VocabularyPart, ...]


class VocabularyPart(paddle.nn.Layer):
    """Some rows of a vocabulary: their weights, [rows, hidden], and perhaps their bias, [rows].

    Args:
        hidden: The size of a row.
        part: Which rows; if the full weights are cut along axis 1, the part's are [hidden, rows],
            as in a Linear.
        weight_attr: The ``ParamAttr`` of the weights.
        bias_attr: The ``ParamAttr`` of the bias; False for none.
        name: The name of the weights in the layer.
    """

    bias: Tensor | None
    #: False: it returns numbers of the loss, which no layer of a plain model returns.
    has_plain_output = False

    def __init__(
        self,
        hidden: int,
        part: PartOfWhole,
        weight_attr: Any = None,
        bias_attr: Any = False,
        name: str = "weight",
    ) -> None:
        super().__init__()
        self._part, self._weight_name = part, name
        first, last = self.rows
        rows = last - first
        shape = [hidden, rows] if part.cut.axis else [rows, hidden]
        self.add_parameter(name, _mark_part(self.create_parameter(shape, weight_attr), part))
        self.bias = None
        if bias_attr is not False:
            bias = self.create_parameter([rows], bias_attr, is_bias=True)
            self.bias = _mark_part(bias, part._replace(cut=part.cut._replace(axis=0)))

    @property
    def number(self) -> int:
        """The number of this part of the vocabulary, from 0."""
        return self._part.number

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of the vocabulary in this part, and the one after the last."""
        return self._part.cut.start, self._part.cut.stop

    def extra_repr(self) -> str:
        """Returns the rows for the first line of the layer's ``repr``."""
        return f"rows={self.rows[0]}..{self.rows[1] - 1}"

    def forward(self, value: Nest) -> Nest:
        """Computes the :meth:`statistics` of each row, [3, rows], or defers this to the loss.

        Args:
            value: In a pipeline, a tuple of the hidden values and the labels; in one process, the
                hidden values, or the result of the part before.
        """
        if isinstance(value, DeferredLogits):
            return value._replace(parts=(*value.parts, self))
        if isinstance(value, tuple):
            return self.statistics(*value)
        return DeferredLogits(value, (self,))

    def statistics(self, hidden: Tensor, label: Tensor) -> Tensor:
        """Returns three numbers for each row, [3, rows].

        The numbers are log(sum(exp(logits))); the label's logit, or 0 if the label is in another
        part; and 1 if the label is in this part, else 0.

        Args:
            hidden: The hidden values, [.., hidden].
            label: One class for each row.

        Raises:
            BoundaryError: The labels are not integers.
        """
        if label.dtype not in (paddle.int64, paddle.int32):
            raise BoundaryError(
                "the labels of a VocabularyHead are classes",
                expected="a Tensor of int64 or int32",
                got=f"a Tensor of {label.dtype}",
                fix="cast the labels, and where they are several tensors name the classes first",
            )
        rows = hidden.reshape([-1, hidden.shape[-1]])
        local = label.detach().reshape([-1, 1]) - self.rows[0]
        # ``local``: the labels' rows in this part, which are out of its range for other labels.
        compute: Callable[..., Tensor] = _Statistics.apply
        biases = [] if self.bias is None else [self.bias]
        return compute(self._part.cut.axis, rows, getattr(self, self._weight_name), local, *biases)


class EmbeddingInParts(paddle.nn.Layer):
    """An embedding whose rows are several parameters, ``part0`` and so on.

    Args:
        hidden: The size of a row.
        parts: The rows of each parameter.
        weight_attr: The ``ParamAttr`` of each part.
    """

    def __init__(self, hidden: int, parts: Sequence[PartOfWhole], weight_attr: Any = None) -> None:
        super().__init__()
        self._vocabulary_parts = tuple(parts)
        for part in parts:
            rows = part.cut.stop - part.cut.start
            weight = self.create_parameter([rows, hidden], attr=weight_attr)
            self.add_parameter(_part_name(part.number), _mark_part(weight, part))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the rows of tokens, [.., hidden]: the sum over parts, all but one of zeros."""
        looked_up = []
        for part in self._vocabulary_parts:
            first, last = part.cut.start, part.cut.stop
            is_in_part = paddle.logical_and(tokens >= first, tokens < last)
            local = paddle.where(is_in_part, tokens - first, paddle.zeros_like(tokens))
            rows = paddle.nn.functional.embedding(local, getattr(self, _part_name(part.number)))
            looked_up.append(rows * is_in_part.unsqueeze(-1).astype(rows.dtype))
        return paddle.add_n(looked_up)


class _Statistics(paddle.autograd.PyLayer):
    """Computes what :meth:`VocabularyPart.statistics` returns, from one part of the logits.

    The arguments are: the axis of the vocabulary in the weight; the hidden values [rows, hidden];
    the weight; the labels' rows in this part [rows, 1], out of its range for labels of other parts;
    and the bias, if there is one. Backward needs one buffer of the size of these logits: their
    exponentials, which are overwritten by the gradient.
    """

    @staticmethod
    def forward(
        ctx: Context, axis: int, rows: Tensor, weight: Tensor, local: Tensor, *biases: Tensor
    ) -> Tensor:
        is_in_part = paddle.logical_and(local >= 0, local < weight.shape[axis])
        index = paddle.where(is_in_part, local, paddle.zeros_like(local))
        logits = _multiply(rows, weight, transpose_y=axis == 0)
        for bias in biases:
            logits.add_(bias)
        of_label = paddle.take_along_axis(logits, index, 1) * is_in_part.astype(logits.dtype)
        highest = logits.max(axis=1, keepdim=True)
        logits.subtract_(highest)
        logits.exp_()
        total = logits.sum(axis=1, keepdim=True)
        ctx.save_for_backward(rows, weight, *biases)
        # The buffer of the logits holds their exponentials from here on.
        ctx.buffers, ctx.axis = (logits, total, index, is_in_part), axis
        numbers = [paddle.log(total) + highest, of_label, is_in_part.astype(logits.dtype)]
        return paddle.concat(numbers, axis=1).t()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        rows, weight, *biases = ctx.saved_tensor()
        (exponentials, total, index, is_in_part), ctx.buffers = ctx.buffers, None
        log_sum_grad, label_grad, _ = grad.t().split(3, axis=1)
        # In place: the exponentials become the gradient of the logits.
        logits_grad = exponentials
        logits_grad.multiply_(log_sum_grad / total)
        label_grad = label_grad * is_in_part.astype(grad.dtype)
        logits_grad.put_along_axis_(index, label_grad, 1, reduce="add")
        rows_grad = weight_grad = None
        if not rows.stop_gradient:
            rows_grad = _multiply(logits_grad, weight, transpose_y=ctx.axis == 1)
        if not weight.stop_gradient:
            factors = (rows, logits_grad) if ctx.axis else (logits_grad, rows)
            weight_grad = _multiply(*factors, transpose_x=True)
        bias_grads = [None if b.stop_gradient else logits_grad.sum(axis=0) for b in biases]
        return rows_grad, weight_grad, None, *bias_grads


def vocabulary_loss(value: Nest) -> Nest:
    """Returns the results of the vocabulary's parts as a tuple, for the loss function.

    This is the function of the last stage, which has no layers. If layers are recomputed, the
    result of a single part arrives without its tuple.
    """
    return value if isinstance(value, tuple) else (value,)


def refuse_whole_logits(losses: Sequence[Any]) -> None:
    """Raises ConfigError for Paddle's own cross-entropy: no rank has the full logits that it needs.

    Args:
        losses: The loss functions of a model with a head.
    """
    functions = paddle.nn.functional
    for loss in losses:
        if isinstance(loss, paddle.nn.CrossEntropyLoss) or loss in (
            functions.cross_entropy,
            functions.softmax_with_cross_entropy,
        ):
            raise ConfigError(
                "the loss of a model with a VocabularyHead is made of parts of the logits",
                expected="VocabularyLoss(ignore_index, reduction), or a function that begins with "
                "vocabulary_cross_entropy",
                got=f"loss_fn={getattr(loss, '__name__', type(loss).__name__)}",
                fix="from fleetpipe.dygraph import VocabularyLoss; loss_fn=VocabularyLoss()",
            )


#: A pipeline calls this function with its loss functions if ``vocabulary_loss`` is its last entry.
vocabulary_loss.require_losses = refuse_whole_logits  # type: ignore[attr-defined]


class _CopyForParts(paddle.autograd.PyLayer):
    """Copies the hidden values for each part; adds the copies' gradients in a pipeline's order.

    A pipeline adds the last part's gradient first, and the order changes the bits.
    """

    @staticmethod
    def forward(ctx: Context, value: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(value.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        *rest, total = grads
        for grad in rest[::-1]:
            total = total + grad
        return total


def vocabulary_cross_entropy(output: Nest, label: Tensor, ignore_index: int = -100) -> Tensor:
    """Computes the cross-entropy of each row, like ``F.cross_entropy(.., reduction="none")``.

    Args:
        output: The output of a model whose last layer is a :class:`VocabularyHead`.
        label: One class, an integer, for each row.
        ignore_index: The label of rows that do not count: their loss is 0.

    Returns:
        A Tensor of the label's shape.

    Raises:
        BoundaryError: The model has no VocabularyHead, or a label is none of the head's classes.
    """
    if isinstance(output, DeferredLogits):
        copy: Callable[..., Sequence[Tensor]] = _CopyForParts.apply
        pairs = zip(output.parts, copy(output.hidden, len(output.parts)))
        output = tuple(part.statistics(hidden, label) for part, hidden in pairs)
    if not isinstance(output, tuple) or not all(isinstance(n, paddle.Tensor) for n in output):
        raise BoundaryError(
            "vocabulary_cross_entropy takes what a model with a VocabularyHead returns",
            got=type(output).__name__,
            fix="make VocabularyHead(hidden, vocabulary) the last entry of the list of layers",
        )
    log_sums, label_logits, is_in_part = paddle.stack(list(output), axis=1)
    labels = label.reshape([-1])
    counted = labels != ignore_index
    unknown = paddle.logical_and(counted, is_in_part.detach().sum(axis=0) == 0)
    if bool(to_host(unknown.any())):
        raise BoundaryError(
            "a label is no class of the VocabularyHead",
            expected=f"0 to vocabulary - 1, or ignore_index={ignore_index}",
            got=f"label {labels[unknown].tolist()[0]}",
            fix="correct the labels, or pass ignore_index for rows that do not count",
        )
    losses = paddle.logsumexp(log_sums, axis=0) - label_logits.sum(axis=0)
    return (losses * counted.astype(losses.dtype)).reshape(label.shape)


@shows("ignore_index", "reduction")
class VocabularyLoss:
    """The loss of a model whose last layer is a :class:`VocabularyHead`.

    Args:
        ignore_index: The label of rows that do not count.
        reduction: "mean" over the rows that count, or "sum". As in Paddle's ``CrossEntropyLoss``,
            all rows count if ``ignore_index`` is below 0 (in 3.3, not in 2.6).

    Raises:
        ConfigError: The reduction is another one.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise ConfigError(
                "the loss of a batch is one number",
                expected="reduction='mean' or 'sum'",
                got=f"reduction={reduction!r}",
                fix="for each row's use vocabulary_cross_entropy in a loss_fn of your own",
            )
        self.ignore_index, self.reduction = ignore_index, reduction
        kind: Any = paddle.nn.CrossEntropyLoss
        #: Paddle's loss that counts the same positions; the pipeline weights by its options.
        self.declares = kind(ignore_index=ignore_index, reduction=reduction)

    def __call__(self, output: Nest, label: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, from the output of the model's head."""
        losses = vocabulary_cross_entropy(output, label, self.ignore_index)
        if self.reduction == "sum":
            return losses.sum()
        if self.ignore_index < 0 and not mean_leaves_out_below_zero():
            return losses.mean()
        return losses.sum() / (label != self.ignore_index).sum().clip(min=1).astype(losses.dtype)


class HeadBorders(Chain):
    """Sends the output of the last stage before the head, with the labels, to all parts.

    The loss gets the results of the parts, in order.
    """

    def __init__(self, placement: Placement) -> None:
        """Finds the stages of the head: a stage for each part, and the last for the loss."""
        super().__init__(placement)
        self._before_head, self._loss = placement.body - 1, placement.stages - 1

    def join(self, values: Values) -> Nest:
        """Returns the input of a stage: one value, or for the loss a tuple of the parts' values.

        Args:
            values: By edge into the stage, the value that arrived.
        """
        is_for_loss = next(iter(values)).target == self._loss
        return tuple(values.values()) if is_for_loss else super().join(values)

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns, by edge out of a stage, the value to send along the edge.

        The value is the stage's output; from the last stage before the head, which sends to all
        parts, a pair of the output and the classes.

        Args:
            stage: The stage.
            output: What the stage has computed.
            labels: The labels of the micro-batch: classes, in the first of their tensors.

        Raises:
            BoundaryError: The parts need labels, and there are none.
        """
        if stage == self._before_head:
            classes = next(tensors_of(labels), None)
            if classes is None:
                raise BoundaryError(
                    "a VocabularyHead computes with the labels, and there are none",
                    where="last stage before the head",
                    cause="eval_batch without compute_loss, or predict_batch: no rank has whole "
                    "logits",
                    fix="use eval_batch(.., compute_loss=True), or evaluate of a fleetpipe.Model",
                )
            output = output, classes
        return super().split(stage, output, labels)


def with_whole_head(
    layers: Mapping[int, Layer], shared: Collection[int], group: Callable[[], Group]
) -> dict[int, Layer | LayerInParts]:
    """Returns the layers that Fleet's files are written for; the parts of a head become one layer.

    A head tied to the embedding has no file, since its weights are in the embedding's file.

    Args:
        layers: The layers of this process, by number.
        shared: The numbers of the layers that share weights with others.
        group: Returns the group of ranks that hold the stages.

    Returns:
        By the number in a file's name, the layer or the parts of the layer. A head has the number
        of its first part.
    """
    whole: dict[int, Layer | LayerInParts] = {}
    # By name of a parameter of the head, the parts of this process.
    parts: dict[str, list[Tensor]] = {}
    for index, layer in layers.items():
        if isinstance(layer, EmbeddingInParts):
            whole[index] = LayerInParts({"weight": layer.parameters()})
        elif not isinstance(layer, VocabularyPart):
            whole[index] = layer
        elif index not in shared:
            for name, tensor in layer.state_dict().items():
                parts.setdefault(name, []).append(tensor)
            whole[index - layer.number] = LayerInParts(parts, group)
    return whole

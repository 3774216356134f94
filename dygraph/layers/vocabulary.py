"""A head over a large vocabulary, in parts: its products, and the cross-entropy over all of them.

With hidden values x [rows, hidden] and the rows W_r [vocabulary / p, hidden] of part r its logits
are z_r = x W_r^T. Of each row only three numbers leave a part: log(sum(exp(z_r))); the label's
logit, 0 where the label is in another part; and whether it is in this one. The loss of a row is
the logarithm of the summed exponentials of the first, less the sum of the second.

A pipeline computes each part on a rank of its own. One process has them all, and computes each
in the same products and sums, when the loss asks for it: until then the logits are deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from fleetpipe.aliases import Context, Nest, Tensor
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.kernels import mean_leaves_out_below_zero
from fleetpipe.representation import shows

# Typed: Paddle's own is not.
_multiply: Callable[..., Tensor] = paddle.matmul

_LayerDesc: Callable[..., Any] = paddle_fleet.meta_parallel.LayerDesc
_SharedLayerDesc: Callable[..., Any] = paddle_fleet.meta_parallel.SharedLayerDesc


@shows("hidden", "vocabulary", "tied")
class _Description:
    """What stands in a list of layers until the number of ranks is known."""

    def __init__(self, hidden: int, vocabulary: int, weight_attr: Any, tied: str | None) -> None:
        for name, size in (("hidden", hidden), ("vocabulary", vocabulary)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(
                    f"{name} of a {type(self).__name__} is a number of 1 or more",
                    got=f"{name}={size!r}",
                    fix="give the whole number that the layers before it, or the labels, have",
                )
        self.hidden, self.vocabulary = hidden, vocabulary
        self.weight_attr, self.tied = weight_attr, tied

    def __call__(self, _value: Nest) -> Nest:
        """Refuses to be called: it is a description."""
        raise ConfigError(
            f"a {type(self).__name__} is a description, which only a PipelineLayer builds",
            fix="make it an entry of the list of layers of a PipelineLayer",
        )

    def bounds(self, ranks: int) -> list[int]:
        """Returns the first class of each part, then the number of classes.

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
        return [part * self.vocabulary // ranks for part in range(ranks + 1)]


class VocabularyHead(_Description):
    """Describes the last entry of a list of layers: the product with a vocabulary, in parts.

    Each rank of the pipeline holds the weights of one part, [vocabulary / p, hidden]. The loss
    function takes what the model returns to :func:`vocabulary_cross_entropy`.

    Args:
        hidden: Numbers of a row of what the layer before returns, [.., hidden].
        vocabulary: Number of classes.
        weight_attr: The ``ParamAttr`` of the weights of each part.
        tied: The key of the :class:`VocabularyEmbedding` whose weights these are; None for weights
            of its own.
    """

    def __init__(
        self, hidden: int, vocabulary: int, weight_attr: Any = None, tied: str | None = None
    ) -> None:
        super().__init__(hidden, vocabulary, weight_attr, tied)

    def layers(self, ranks: int) -> list[Any]:
        """Returns what it stands for: a part for each rank, and the loss."""
        parts: list[Any] = []
        bounds = self.bounds(ranks)
        for part, (first, last) in enumerate(zip(bounds, bounds[1:])):
            arguments = self.hidden, first, last, self.weight_attr
            if self.tied is None:
                parts.append(_LayerDesc(VocabularyPart, *arguments))
            else:
                name = _name(part)
                shared = _SharedLayerDesc(self.tied, VocabularyPart, None, [name], *arguments, name)
                parts.append(shared)
        return [*parts, vocabulary_loss]


class VocabularyEmbedding(_Description):
    """Describes an embedding with which a :class:`VocabularyHead` may be tied.

    Its rank holds all rows, as parts; every other rank has a copy of the part that its head needs.

    Args:
        key: What the head names as ``tied``.
        hidden: Numbers of a row.
        vocabulary: Number of rows.
        weight_attr: The ``ParamAttr`` of the weights of each part.
    """

    def __init__(self, key: str, hidden: int, vocabulary: int, weight_attr: Any = None) -> None:
        super().__init__(hidden, vocabulary, weight_attr, key)

    def layers(self, ranks: int) -> list[Any]:
        """Returns what it stands for: one layer."""
        bounds, names = self.bounds(ranks), [_name(part) for part in range(ranks)]
        arguments = self.hidden, bounds, self.weight_attr
        return [_SharedLayerDesc(self.tied, EmbeddingInParts, None, names, *arguments)]


def _name(part: int) -> str:
    """Returns the name of the weights of a part that are shared."""
    return f"part{part}"


class DeferredLogits(NamedTuple):
    """The logits of one process's model, which the loss computes part by part.

    Attributes:
        hidden: What the head takes, [.., hidden].
        parts: Its parts.
    """

    hidden: Tensor
    parts: tuple[VocabularyPart, ...]


class VocabularyPart(paddle.nn.Layer):
    """The rows ``first`` to ``last - 1`` of a vocabulary: their weights, [last - first, hidden]."""

    def __init__(
        self, hidden: int, first: int, last: int, weight_attr: Any = None, name: str = "weight"
    ) -> None:
        super().__init__()
        self.first, self.last, self._name = first, last, name
        weight = self.create_parameter([last - first, hidden], attr=weight_attr)
        self.add_parameter(name, weight)

    def extra_repr(self) -> str:
        """Returns what stands in the first line of its ``repr``."""
        return f"rows={self.first}..{self.last - 1}"

    def forward(self, value: Nest) -> Nest:
        """Computes its numbers of each row, [3, rows], or defers that to the loss.

        Args:
            value: In a pipeline the hidden values and the labels, which come together; in one
                process the hidden values, or what the part before returned.
        """
        if isinstance(value, DeferredLogits):
            return value._replace(parts=(*value.parts, self))
        if isinstance(value, tuple):
            return self.statistics(*value)
        return DeferredLogits(value, (self,))

    def statistics(self, hidden: Tensor, label: Tensor) -> Tensor:
        """Returns three numbers of each row, [3, rows].

        They are log(sum(exp(logits))), the label's logit, and 1 where the label is in this part.

        Args:
            hidden: [.., hidden].
            label: Classes, as many as there are rows.

        Raises:
            BoundaryError: The labels are no whole numbers.
        """
        if label.dtype not in (paddle.int64, paddle.int32):
            raise BoundaryError(
                "the labels of a VocabularyHead are classes",
                expected="a Tensor of int64 or int32",
                got=f"a Tensor of {label.dtype}",
                fix="cast the labels, and where they are several tensors name the classes first",
            )
        rows = hidden.reshape([-1, hidden.shape[-1]])
        local = label.detach().reshape([-1, 1]) - self.first
        compute: Callable[..., Tensor] = _Statistics.apply
        return compute(rows, getattr(self, self._name), local)


class EmbeddingInParts(paddle.nn.Layer):
    """An embedding whose rows are several parameters, ``part0`` and so on.

    Args:
        hidden: Numbers of a row.
        bounds: The first row of each part, then the number of rows.
        weight_attr: The ``ParamAttr`` of each part.
    """

    def __init__(self, hidden: int, bounds: Sequence[int], weight_attr: Any = None) -> None:
        super().__init__()
        self._bounds = tuple(bounds)
        for part, (first, last) in enumerate(zip(bounds, bounds[1:])):
            weight = self.create_parameter([last - first, hidden], attr=weight_attr)
            self.add_parameter(_name(part), weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the rows of tokens, [.., hidden]: in all parts but one a row is zeros."""
        looked_up = []
        for part, (first, last) in enumerate(zip(self._bounds, self._bounds[1:])):
            here = paddle.logical_and(tokens >= first, tokens < last)
            local = paddle.where(here, tokens - first, paddle.zeros_like(tokens))
            rows = paddle.nn.functional.embedding(local, getattr(self, _name(part)))
            looked_up.append(rows * here.unsqueeze(-1).astype(rows.dtype))
        return paddle.add_n(looked_up)


class _Statistics(paddle.autograd.PyLayer):
    """The logits of a part, of which one buffer of rows x part is kept and nothing else."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, weight: Tensor, local: Tensor) -> Tensor:
        here = paddle.logical_and(local >= 0, local < weight.shape[0])
        index = paddle.where(here, local, paddle.zeros_like(local))
        logits = _multiply(rows, weight, transpose_y=True)
        chosen = paddle.take_along_axis(logits, index, 1) * here.astype(logits.dtype)
        highest = logits.max(axis=1, keepdim=True)
        logits.subtract_(highest)
        logits.exp_()
        total = logits.sum(axis=1, keepdim=True)
        ctx.save_for_backward(rows, weight)
        ctx.kept = logits, total, index, here
        numbers = [paddle.log(total) + highest, chosen, here.astype(logits.dtype)]
        return paddle.concat(numbers, axis=1).t()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensor()
        (logits, total, index, here), ctx.kept = ctx.kept, None
        of_sum, of_chosen, _ = grad.t().split(3, axis=1)
        logits.multiply_(of_sum / total)
        of_label = of_chosen * here.astype(grad.dtype)
        logits.put_along_axis_(index, of_label, 1, reduce="add")
        of_rows = None if rows.stop_gradient else _multiply(logits, weight)
        of_weight = None
        if not weight.stop_gradient:
            of_weight = _multiply(logits, rows, transpose_x=True)
        return of_rows, of_weight, None


class _Copies(paddle.autograd.PyLayer):
    """A value for each part, whose gradients are added as in a pipeline: the last part's first."""

    @staticmethod
    def forward(ctx: Context, value: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(value.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        *rest, total = grads
        for grad in rest[::-1]:
            total = total + grad
        return total


def vocabulary_loss(value: Nest) -> Nest:
    """Stands for the loss in a list of layers: its stage has no layers of its own."""
    return value


def vocabulary_cross_entropy(output: Nest, label: Tensor, ignore_index: int = -100) -> Tensor:
    """Returns the cross-entropy of each row, as ``F.cross_entropy(.., reduction="none")`` does.

    Args:
        output: What a model returns whose last layer is a :class:`VocabularyHead`.
        label: Classes, whole numbers, as many as there are rows.
        ignore_index: The label of rows that have no loss: theirs is 0.

    Returns:
        A Tensor of the label's shape.

    Raises:
        BoundaryError: The output is of another model, or a label is no class of it.
    """
    if isinstance(output, DeferredLogits):
        copy: Callable[..., Sequence[Tensor]] = _Copies.apply
        pairs = zip(output.parts, copy(output.hidden, len(output.parts)))
        output = tuple(part.statistics(value, label) for part, value in pairs)
    if not isinstance(output, tuple) or not all(isinstance(one, paddle.Tensor) for one in output):
        raise BoundaryError(
            "vocabulary_cross_entropy takes what a model with a VocabularyHead returns",
            got=type(output).__name__,
            fix="make VocabularyHead(hidden, vocabulary) the last entry of the list of layers",
        )
    sums, chosen, here = paddle.stack(list(output), axis=1)
    labels = label.reshape([-1])
    counted = labels != ignore_index
    unknown = paddle.logical_and(counted, here.detach().sum(axis=0) == 0)
    if bool(unknown.any()):
        raise BoundaryError(
            "a label is no class of the VocabularyHead",
            expected=f"0 to vocabulary - 1, or ignore_index={ignore_index}",
            got=f"label {labels[unknown].tolist()[0]}",
            fix="correct the labels, or pass ignore_index for rows that do not count",
        )
    losses = paddle.logsumexp(sums, axis=0) - chosen.sum(axis=0)
    return (losses * counted.astype(losses.dtype)).reshape(label.shape)


@shows("ignore_index", "reduction")
class VocabularyLoss:
    """The loss of a model whose last layer is a :class:`VocabularyHead`.

    Args:
        ignore_index: The label of rows that do not count.
        reduction: "mean" over the rows that count, or "sum". As in Paddle's ``CrossEntropyLoss``
            all rows count where ``ignore_index`` is below 0 (in 3.3, not in 2.6).

    Raises:
        ConfigError: Another reduction.
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

    def __call__(self, output: Nest, label: Tensor) -> Tensor:
        """Returns the loss of a micro-batch; see :func:`vocabulary_cross_entropy`."""
        losses = vocabulary_cross_entropy(output, label, self.ignore_index)
        if self.reduction == "sum":
            return losses.sum()
        if self.ignore_index < 0 and not mean_leaves_out_below_zero():
            return losses.mean()
        return losses.sum() / (label != self.ignore_index).sum().clip(min=1).astype(losses.dtype)


def with_parts(entries: Sequence[Any], ranks: int) -> list[Any]:
    """Returns a list of layers with what describes a vocabulary replaced by its parts.

    Args:
        entries: The list, as the user gave it.
        ranks: Ranks of the pipeline.

    Raises:
        ConfigError: A head that is not the last entry.
    """
    for index, entry in enumerate(entries[:-1]):
        if isinstance(entry, VocabularyHead):
            raise ConfigError(
                "a VocabularyHead is the last entry of a list of layers",
                where=f"layer {index} of {len(entries)}",
                fix="put it at the end, and what follows into the loss function",
            )
    layers: list[Any] = []
    described = VocabularyEmbedding, VocabularyHead
    for entry in entries:
        layers += entry.layers(ranks) if isinstance(entry, described) else [entry]
    return layers

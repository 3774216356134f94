"""LoRA (arXiv:2106.09685): trains two small factors beside each chosen linear layer, all frozen.

Put adapters into a list of layers, or into a plain model, before a pipeline is made of it::

    layers = lora.adapt(layers, targets=["qkv", "projection"], rank=8, alpha=16)
    model = fleet.distributed_model(PipelineLayer(layers, topology=.., loss_fn=..))
    manager.save(step, model=lora.TrainedPart(model), optimizer=optimizer)
    merged = lora.merge(plain)
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.checkpoint.contents.model_and_optimizer import NamedTensors, without_wrappers
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.dygraph.layers.entries import Blueprints, Entry, SeveralLayers, is_shared
from fleetpipe.dygraph.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from fleetpipe.errors import ConfigError, listed, require_whole
from fleetpipe.mesh.parts import ModelParts, whole_name
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import parameters_in
from fleetpipe.representation import shows

__all__ = ["BasePart", "TrainedPart", "adapt", "merge"]


def adapt(
    model: Layer | Sequence[Entry], targets: Collection[str], rank: int = 8, alpha: float = 16.0
) -> Any:
    """Freezes a model, and puts an adapter beside each of some linear layers. Not collective.

    An adapted layer adds ``x @ lora_A.weight @ lora_B.weight * alpha / rank`` to its output.
    ``lora_A`` is drawn from Paddle's generator, as in PEFT, and ``lora_B`` is zero. To train other
    parameters too, set their ``stop_gradient = False`` afterwards.

    Args:
        model: The list of layers of a ``PipelineLayer``, or a plain layer for
            :func:`fleetpipe.pipeline`.
        targets: The last parts of the paths of the layers, such as ``["qkv", "mlp.up"]``. In a list
            of layers, paths begin with a layer's number: ``"3.qkv"``. The layers are ``nn.Linear``,
            ``ColumnParallelLinear`` or ``RowParallelLinear``.
        rank: Columns of ``lora_A``.
        alpha: The scale of an adapter's output, times ``rank``.

    Returns:
        The layer itself, or a new list of layers.

    Raises:
        ConfigError: The model is cut already, a target is in no path, or a layer is not linear. The
            model is unchanged.
    """
    options = _AdapterOptions(
        frozenset([targets] if isinstance(targets, str) else targets), rank, alpha
    )
    if isinstance(model, PipelineLayer):
        raise ConfigError(
            "adapters are put into a model before it is cut into stages",
            got=f"a {type(model).__name__}",
            cause="its ranks know the names and shapes of the layers that it was made of",
            fix="adapt the list of layers, or the plain model; PaddleNLP's LoRAModel takes the "
            "..Pipe models of that library",
        )
    if isinstance(model, paddle.nn.Layer):
        options.require_paths(path for path, _ in options.target_layers(model))
        return options.put_into(model)
    entries = [_adapted_entry(entry, options, index) for index, entry in enumerate(model)]
    paths: list[str] = []
    for index, layer in enumerate(Blueprints(entries)):
        if isinstance(layer, paddle.nn.Layer):
            built = layer is entries[index]
            chosen = (
                options.target_layers(layer, str(index))
                if built
                else _adapted_layers(layer, str(index))
            )
            paths += (path for path, _ in chosen)
        if is_shared(entries[index]) and paths and paths[-1].startswith(f"{index}."):
            raise _shared_weight_error(paths[-1])
    options.require_paths(paths)
    for index, entry in enumerate(entries):
        if isinstance(entry, paddle.nn.Layer):
            options.put_into(entry, str(index))
    return entries


def merge(model: Layer) -> Layer:
    """Adds each adapter to the weight beside it, and removes the adapter. Not collective.

    Args:
        model: A plain layer with adapters; its linear layers get their own classes again.
            Parameters stay frozen.

    Returns:
        The layer itself.

    Raises:
        ConfigError: ``model`` is a pipeline.
    """
    if isinstance(without_wrappers(model), PipelineLayer):
        raise ConfigError(
            "adapters are merged into a model that is whole",
            got=f"a {type(model).__name__}",
            fix="copy the pipeline to an adapted plain model first, by layers.copy_to(plain) or "
            "fleetpipe.load_single(plain, folder)",
        )
    for _, layer in [*_adapted_layers(model)]:
        with paddle.no_grad():
            product = layer.lora_A.weight @ layer.lora_B.weight
            layer.weight.set_value(layer.weight + product * layer.lora_scale)
        del layer.lora_A, layer.lora_B, layer.lora_scale, layer.lora_text
        _, layer.__class__ = type(layer).__bases__
    return model


class _AdapterOptions:
    """The options of ``adapt``: which layers get an adapter, of which rank and scale."""

    def __init__(self, targets: frozenset[str], rank: int, alpha: float) -> None:
        """Takes and checks the arguments of :func:`adapt`; raises ConfigError if one is wrong."""
        require_whole("rank", rank, rule="rank is a number of 1 or more", fix="give such a number")
        if not 0 < alpha < math.inf:
            raise ConfigError(
                "alpha / rank is the scale of what an adapter adds: it is a number above 0",
                got=f"alpha={alpha}",
                fix="give a number such as rank, or twice that",
            )
        self._targets, self._rank, self._scale = targets, rank, alpha / rank
        self._text = f"rank {rank}, alpha {alpha:g}, targets {', '.join(sorted(targets))}"

    def target_layers(self, model: Layer, path: str = "") -> list[tuple[str, Any]]:
        """Finds the layers within a model that get an adapter.

        Args:
            model: The model, or an entry of a list of layers.
            path: The path of ``model`` in the whole model.

        Returns:
            The path and the layer of each layer that gets an adapter.

        Raises:
            ConfigError: A target takes no adapter, or the model has adapters already.
        """
        for name, _ in _adapted_layers(model, path):
            raise _already_adapted_error(name)
        layers = [*model.named_sublayers(prefix=path, include_self=True)]
        users = Counter(id(p) for _, layer in layers for p in parameters_in(layer).values())
        targets = [
            (name, layer)
            for name, layer in layers
            if any(_ends_with(name, target) for target in self._targets)
        ]
        for name, layer in targets:
            _require_linear(layer, name)
            if users[id(layer.weight)] > 1:
                raise _shared_weight_error(name)
        return targets

    def put_into(self, model: Layer, path: str = "") -> Layer:
        """Freezes a layer, and puts adapters into the targets in it; returns the layer."""
        chosen = self.target_layers(model, path)
        for parameter in model.parameters():
            parameter.stop_gradient = True
        for _, layer in chosen:
            factors = _build_factors(layer, self._rank)
            layer.lora_A, layer.lora_B = (f.to(dtype=layer.weight.dtype) for f in factors)
            layer.lora_scale, layer.lora_text = self._scale, self._text
            layer.__class__ = _subclass_with(_Adapter, layer.__class__)
        return model

    def require_paths(self, paths: Iterable[str]) -> None:
        """Raises ConfigError if a target is the end of no path of an adapted layer."""
        adapted = [*paths]
        absent = [
            target
            for target in sorted(self._targets)
            if not any(_ends_with(path, target) for path in adapted)
        ]
        if absent or not adapted:
            raise ConfigError(
                "there is no such layer to put an adapter into",
                expected="the last parts of the paths of linear layers",
                got=listed(absent) or "no targets",
                fix="print(layer) shows the names of the layers in it",
            )


def _already_adapted_error(path: str) -> ConfigError:
    """Returns the error for a model whose layer at ``path`` has an adapter already."""
    return ConfigError(
        "the model has adapters already, which others beside them would freeze",
        where=path,
        fix="name all targets in one call of lora.adapt, or merge the earlier ones before",
    )


def _shared_weight_error(path: str) -> ConfigError:
    """Returns the error for a target at ``path`` whose weight other layers use too."""
    return ConfigError(
        "an adapter beside a weight that several layers use would be merged into all of them",
        where=path,
        fix="leave this layer out of targets, or give it a weight of its own",
    )


class _Adapter(paddle.nn.Layer):
    """Adds an adapter's output to that of a linear layer.

    The class of an adapted layer is derived from this one and from the layer's own class.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Adds the adapter's output to that of the frozen layer."""
        # After paddle.jit.to_static, super() would call this method again.
        linear: Any = type(self).__bases__[1]
        return linear.forward(self, x) + self.lora_B(self.lora_A(x)) * self.lora_scale


class _AdaptedEntry:
    """Puts adapters into the layer that a description builds.

    The class of an adapted description is derived from this one and from its own class.
    """

    #: The options of the adapters, and the path of the layer.
    lora: tuple[_AdapterOptions, str]

    def build_layer(self, **lent: Tensor) -> Layer:
        """Builds the layer as it was described, and puts adapters into it."""
        described: Any = super()
        options, path = self.lora
        return options.put_into(described.build_layer(**lent), path)


@functools.cache
def _subclass_with(mixin: Any, kind: Any) -> Any:
    """Returns a class with the bases ``mixin`` and ``kind``, and the name of ``kind``."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def _adapted_entry(entry: Entry, options: _AdapterOptions, index: int) -> Entry:
    """Returns a description of entry ``index`` whose layer gets adapters when it is built.

    Built layers and functions are returned unchanged.
    """
    if isinstance(entry, SeveralLayers):
        raise ConfigError(
            "a head in parts takes no adapter, and is not frozen by lora.adapt",
            where=f"layer {index} of the list",
            got=f"a {type(entry).__name__}",
            fix="describe the head as a layer like the others",
        )
    if isinstance(entry, _AdaptedEntry):
        raise _already_adapted_error(str(index))
    if hasattr(entry, "build_layer"):
        entry = copy.copy(entry)
        entry.lora = options, str(index)
        entry.__class__ = _subclass_with(_AdaptedEntry, entry.__class__)
    return entry


def _adapted_layers(model: Layer, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and the layer of each layer with an adapter; ``path`` is the model's own."""
    named = model.named_sublayers(prefix=path, include_self=True)
    return ((name, layer) for name, layer in named if isinstance(layer, _Adapter))


def _ends_with(path: str, target: str) -> bool:
    """Returns whether the last parts of a dotted path are ``target``."""
    return f".{path}".endswith(f".{target}")


def _build_factors(layer: Any, rank: int) -> tuple[Layer, Layer]:
    """Builds ``lora_A`` [inputs, rank] and ``lora_B`` [rank, outputs] for a linear layer.

    One of the two is split over the ranks like the layer's weight.
    """
    draws: Any = paddle.ParamAttr(
        initializer=paddle.nn.initializer.KaimingUniform(
            negative_slope=math.sqrt(5), nonlinearity="leaky_relu"
        )
    )
    zeros: Any = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(0.0))
    inputs, outputs = layer.weight.shape
    full = functools.partial(paddle.nn.Linear, bias_attr=False)
    if isinstance(layer, paddle.nn.Linear):
        return full(inputs, rank, draws), full(rank, outputs, zeros)
    kind: Any = type(layer)
    sharded = functools.partial(kind, has_bias=False, mp_group=layer.model_parallel_group)
    mp_ranks = layer.world_size
    if type(layer) is ColumnParallelLinear:
        up = sharded(rank, outputs * mp_ranks, zeros, gather_output=layer.gather_output)
        return full(inputs, rank, draws), up
    down = sharded(inputs * mp_ranks, rank, draws, input_is_parallel=layer.input_is_parallel)
    return down, full(rank, outputs, zeros)


def _require_linear(layer: Any, path: str) -> None:
    """Raises ConfigError for a layer that is not linear, or uses another layer's weight.

    An adapter could not be merged into the weight.
    """
    kinds = (ColumnParallelLinear, RowParallelLinear)
    forward = getattr(type(layer), "forward", None)
    linear = type(layer) in kinds or forward is paddle.nn.Linear.forward
    # weight_norm and spectral_norm compute the weight before each forward.
    if not linear or "weight" not in parameters_in(layer):
        raise ConfigError(
            "this layer takes no adapter",
            where=path or None,
            expected="a Linear, a ColumnParallelLinear or a RowParallelLinear, which computes with "
            "its own weight",
            got=f"a {type(layer).__name__}" + " with a computed weight" * linear,
            fix="name the linear layers alone in targets; merge a norm of weights before, by "
            "paddle.nn.utils.remove_weight_norm",
        )


@shows(model="_model.__class__.__name__")
class BasePart:
    """A model's tensors without its adapters, to pass as ``model`` to a checkpoint manager.

    Thus a model with adapters can restore a checkpoint of the model without adapters.
    """

    #: The rank, alpha and targets of the adapters among the tensors; empty without any.
    _adapter_text = ""

    def __init__(self, model: Layer) -> None:
        """Takes a pipeline, or a layer that is whole on this process. Not collective."""
        self._model = without_wrappers(model)

    def checkpoint_part(self) -> ModelParts:
        """Returns the tensors that this process holds."""
        layer = self._model
        of = layer if isinstance(layer, PipelineLayer) else NamedTensors.of_layer(layer)
        parts: ModelParts = of.checkpoint_part()
        return parts._replace(
            adapters=self._adapter_text,
            tensors={
                name: local
                for name, local in parts.tensors.items()
                if self._has(whole_name(name, local.tensor))
            },
            shapes={name: shape for name, shape in parts.shapes.items() if self._has(name)},
        )

    def _has(self, name: str) -> bool:
        """Returns whether the tensor with a fully qualified name is part of the checkpoint."""
        return {"lora_A", "lora_B"}.isdisjoint(name.split("."))


class TrainedPart(BasePart):
    """A model's tensors that training changes, to pass as ``model`` to a checkpoint manager.

    These are the trained parameters, the buffers and the running statistics. A later job loads the
    frozen weights from their origin, and restores these.
    """

    def __init__(self, model: Layer) -> None:
        """Finds the tensors that training changes. Collective over the pipeline.

        Args:
            model: A pipeline, or a layer that is whole in this process.
        """
        self._names: set[str] | None = None
        super().__init__(model)
        names = []
        for name, local in self.checkpoint_part().tensors.items():
            tensor: Any = local.tensor
            is_frozen = hasattr(tensor, "trainable") and tensor.stop_gradient
            # Buffers count as changed, and the running statistics of a batch norm.
            if not is_frozen or name.split(".")[-1] in ("_mean", "_variance"):
                names.append(whole_name(name, tensor))
        of_rank = names, next((layer.lora_text for _, layer in _adapted_layers(self._model)), "")
        is_pipeline = isinstance(self._model, PipelineLayer)
        of_ranks = self._model.holders().all_gather(of_rank) if is_pipeline else [of_rank]
        self._names = {name for rank_names, _ in of_ranks for name in rank_names}
        self._adapter_text = max(text for _, text in of_ranks)

    def _has(self, name: str) -> bool:
        return self._names is None or name in self._names

"""Defines which tensors of a model and of an optimizer a checkpoint has, and their names.

Start with :class:`NamedTensors` and :class:`OptimizerState`, which a save and a restore use as
:class:`SavedPart` says. A plain model is a model as a user wrote it, from which a list of layers
was made; its names of tensors are the plain names.
The model consists of Paddle's layers, or is a static program. The state of an optimizer is the
accumulators and master weights of parameters. Paddle numbers an accumulator's name when it creates
it; a checkpoint names it after its parameter, ``3.weight/moment1_0``, as PaddleNLP does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fleetpipe import log
from fleetpipe.aliases import Layer, Optimizer, Tensor
from fleetpipe.checkpoint.contents.parts import (
    BUFFERS,
    LATE_BUFFERS,
    LOSS,
    MASTER_WEIGHTS,
    MODEL,
    OPTIMIZER,
    ProgramSource,
    Saved,
    SavedPart,
    TensorName,
    saved_names,
)
from fleetpipe.errors import CheckpointError, ConfigError, listed
from fleetpipe.job.allow import Allow
from fleetpipe.job.job import current_job, mp_shard
from fleetpipe.mesh.parts import Described, LocalTensor, ModelParts, local_tensor_of, whole_name
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import layer_at, put_buffer, wrapped_layer
from fleetpipe.paddle_api.optimizer import (
    base_optimizer,
    create_state,
    forget_state,
    groups_of,
    master_weight_of,
    names_used_in_class,
    state_of,
)
from fleetpipe.paddle_api.tensor import has_memory, is_parameter

_log = log.logger(__name__)

#: The end of an accumulator's name in a checkpoint.
_ACCUMULATOR_SUFFIX = "_0"
#: The packages of optimizers whose state is known.
_PADDLES = {"paddle", "paddlenlp", "paddleformers"}


class NamedTensors(SavedPart):
    """The tensors of a model that this process has, under fully qualified names.

    Args:
        parts: The tensors of this process, and the names and shapes of the whole model's.

    Attributes:
        plain_names: The fully qualified name of each tensor, by its name in the model without the
            pipeline; empty if there is no such model.
    """

    def __init__(self, parts: ModelParts) -> None:
        self.plain_names = parts.plain_names
        self._parts = parts
        #: Tensors that become buffers once they are filled: the model or the loss, the path of the
        #: buffer in it, and the tensor.
        self._new_buffers: list[tuple[Layer, str, Tensor]] = []
        of_model = {id(local.tensor) for local in parts.tensors.values()}
        tensors_of_loss: list[tuple[str, Tensor]] = []
        if parts.loss:
            tensors_of_loss += parts.loss.named_parameters()
            tensors_of_loss += parts.loss.named_buffers()
        #: The tensors of the loss functions that are not the model's; every rank has them.
        self._loss = {
            name: local_tensor_of(tensor, mp_shard)
            for name, tensor in tensors_of_loss
            if id(tensor) not in of_model and has_memory(tensor)
        }

    @classmethod
    def of_layer(cls, layer: Layer) -> NamedTensors:
        """Returns the tensors of a model that is whole in this process, by the model's own names.

        A tensor with several names is under the first of them.
        """
        state = layer.state_dict()
        names: dict[int, str] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), name)
        tensors = {name: local_tensor_of(state[name], mp_shard) for name in names.values()}
        buffers = {
            name: LocalTensor(tensor, differs=True)
            for name, tensor in layer.named_buffers()
            if name not in state and has_memory(tensor)
        }
        shapes = {
            whole_name(n, local.tensor): local.described.shape for n, local in tensors.items()
        }
        return cls(ModelParts(tensors, shapes, buffers, root=layer))

    def checkpoint_part(self) -> ModelParts:
        """Returns the tensors of this process, and the names and shapes of the whole model's."""
        return self._parts

    def order(self) -> tuple[str, ...]:
        """Returns the names of the whole model's parameters and buffers, in the model's order."""
        return tuple(self._parts.shapes)

    def require_no_added_parameters(self) -> None:
        """Checks that the model has no parameters that were added after it was built.

        Raises:
            CheckpointError: A newly built model would lack some.
        """
        added = [
            name for name in self._parts.tensors if self.whole_name(name) not in self._parts.shapes
        ]
        if added:
            raise CheckpointError(
                "the model has parameters that it did not have when it was built: one that is "
                "built anew could not take what would be saved",
                got=listed(added),
                cause="a layer was put around another, as an adapter, after the model was made",
                fix="put it there before the model is made, or in the layer's __init__; or save "
                "layers.state_dict() by paddle.save on each rank",
            )

    def parameters(self) -> Mapping[str, LocalTensor]:
        """Returns the parameters of this process and its losses, by fully qualified name."""
        tensors = {**self._parts.tensors, **(self._loss if self._parts.owns_loss else {})}
        return {name: local for name, local in tensors.items() if _is_parameter(local.tensor)}

    def _tensors(self) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the tensors of the model, and those of its loss if this process saves the loss."""
        for name, local in self._parts.tensors.items():
            yield TensorName(MODEL, self.whole_name(name)), local
        for group, tensors in ((BUFFERS, self._parts.buffers), (LATE_BUFFERS, self._parts.late)):
            for name, local in tensors.items():
                yield TensorName(group, name), local
        for name, local in self._loss.items() if self._parts.owns_loss else ():
            yield TensorName(LOSS, name), local

    def whole_name(self, name: str) -> str:
        """Returns the name of the full tensor of which ``name`` is a part; mostly ``name``."""
        local = self._parts.tensors.get(name)
        return name if local is None else whole_name(name, local.tensor)

    def _targets(self, saved: Saved) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the tensors to fill from a checkpoint, each after its name there.

        They are the parameters and buffers of the model and of its loss functions.
        """
        names, late = self.saved_names(saved), self._late_targets(saved)
        for path, local in self._parts.tensors.items():
            name = TensorName(MODEL, names[self.whole_name(path)])
            yield name, late.pop(name, local)
        for path, local in self._parts.buffers.items():
            if TensorName(BUFFERS, path) in saved.tensors:
                yield TensorName(BUFFERS, path), local
        yield from late.items()
        yield from self._targets_of_loss(saved)

    def _targets_of_loss(self, saved: Saved) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the loss functions' tensors to fill, each after its name in the checkpoint.

        Buffers that only the checkpoint has are created.
        """
        names = {name: described for name, described in saved.tensors.items() if name.group == LOSS}
        for name, described in names.items():
            local = self._loss.get(name.name) or self._make_buffer(
                self._parts.loss, name.name, described
            )
            if local is not None:
                yield name, local
        missing = [name for name in self._loss if TensorName(LOSS, name) not in names]
        if missing:
            begins = "the loss begins as the script makes it"
            log.once(_log.info, f"the checkpoint has no {listed(missing)}: {begins}")

    def _late_targets(self, saved: Saved) -> dict[TensorName, LocalTensor]:
        """Returns tensors to fill for buffers that the first forward would create or resize.

        The key of each is its name in the checkpoint.
        """
        targets: dict[TensorName, LocalTensor] = {}
        for name, described in saved.tensors.items():
            late = name.group == LATE_BUFFERS
            local = (self._parts.late if late else self._parts.tensors).get(name.name)
            is_resized_buffer = (
                local is not None
                and not _is_parameter(local.tensor)
                and local.described.dtype == described.dtype
                and local.described.shape != described.shape
            )
            if late and local is not None and local.described == described:
                targets[name] = local
            elif late or (name.group == MODEL and is_resized_buffer):
                made = self._make_buffer(self._parts.root, name.name, described)
                targets.update({} if made is None else {name: made})
        return targets

    def _make_buffer(self, root: Layer, path: str, described: Described) -> LocalTensor | None:
        """Returns a new tensor, which :meth:`settle` makes the buffer at a path of a layer.

        Args:
            root: The model or the loss.
            path: The path of the buffer.
            described: The dtype and shape of the buffer.

        Returns:
            The tensor; None if this process does not have the layer of the buffer.
        """
        if layer_at(root, path.rpartition(".")[0]) is None:
            return None
        dtype: Any = described.dtype
        buffer = paddle.zeros(list(described.shape), dtype)
        self._new_buffers.append((root, path, buffer))
        return LocalTensor(buffer, differs=True)

    def settle(self) -> None:
        """Hands the filled tensors to the layers, and adds the new buffers to their layers."""
        super().settle()
        for root, path, tensor in self._new_buffers:
            put_buffer(root, path, tensor)

    def saved_names(self, saved: Saved) -> Mapping[str, str]:
        """Returns the name in a checkpoint of each tensor of the whole model and of the loss.

        Raises:
            CheckpointError: The tensors cannot be matched by name or by order.
        """
        names = saved_names(self._parts, saved)
        return {**names, **dict(zip(self._loss, self._loss))}


def _is_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor is a parameter, of a layer or of a static program."""
    return hasattr(tensor, "trainable")


def without_wrappers(model: Any) -> Any:
    """Returns the model inside wrappers such as ``PipelineParallel``; a program itself."""
    while isinstance(model, paddle.nn.Layer) and (wrapped := wrapped_layer(model)) is not None:
        model = wrapped
    return model


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Returns Paddle's optimizer inside fleetpipe's and Fleet's wrappers."""
    return base_optimizer(getattr(optimizer, "wrapped", optimizer))


class OptimizerState(SavedPart):
    """The optimizer's state of the parameters for which this process has it.

    It consists of accumulators and master weights.

    Attributes:
        kind: The name of the optimizer's class.
    """

    def __init__(self, optimizer: Optimizer, model: NamedTensors) -> None:
        self._optimizer = unwrap(optimizer)
        #: Says of which parameters this process has the state; None if it has that of all.
        self._owns_state: Callable[[Tensor], bool] | None
        self._owns_state = getattr(optimizer, "owns_state", None)
        self._model = model
        #: The parameters whose state was created to be filled, and those without saved state.
        self._created: list[Tensor] = []
        self._unsaved: list[Tensor] = []
        self.kind = type(self._optimizer).__name__
        _require_no_other_state(self._optimizer)

    def _tensors(self) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the state of each parameter."""
        for path, parameter in self._parameters():
            yield from self._state_tensors(parameter, self._model.whole_name(path))

    def _targets(self, saved: Saved) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the tensors of the state to fill, each after its name in the checkpoint.

        State that a parameter has in the checkpoint is created if it does not exist yet.
        """
        _require_optimizer_type(self.kind, saved)
        names, saved_state = self._model.saved_names(saved), _saved_state_names(saved)
        for path, parameter in self._parameters():
            name = names[self._model.whole_name(path)]
            if name not in saved_state:
                self._mark_without_state(parameter, name)
            else:
                self._create_state(parameter)
                state = dict(self._state_tensors(parameter, name))
                _require_state_kinds(name, set(state), saved_state[name])
                yield from state.items()

    def settle(self) -> None:
        """Hands the filled state to the optimizer; parameters without saved state lose theirs."""
        super().settle()
        for parameter in self._unsaved:
            forget_state(self._optimizer, parameter)

    def abandon(self) -> None:
        """Removes the state that was created for the restore, after an error."""
        for parameter in self._created:
            forget_state(self._optimizer, parameter)

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        """Yields each parameter whose state this process has: its name, and a handle to the state.

        The handle is the argument ``parameter`` of the methods below: here a pair of the number of
        the parameter's group in the optimizer and the parameter, a :class:`LocalTensor`.
        """
        named = {
            id(local.tensor): (name, local) for name, local in self._model.parameters().items()
        }
        for group, parameters in enumerate(groups_of(self._optimizer)):
            for parameter in parameters:
                owns = self._owns_state is None or self._owns_state(parameter)
                if id(parameter) in named and owns:
                    path, local = named[id(parameter)]
                    yield path, (group, local)

    def _mark_without_state(self, parameter: Any, name: str) -> None:
        """Records that the checkpoint has no state of a parameter, whose name there is ``name``."""
        _, local = parameter
        self._unsaved.append(local.tensor)

    def _create_state(self, parameter: Any) -> None:
        """Creates the state of a parameter if it has none yet, before its first step."""
        group, local = parameter
        if not state_of(self._optimizer, local.tensor.name):
            self._created.append(local.tensor)
            create_state(self._optimizer, group, [local.tensor])

    def _state_tensors(self, parameter: Any, path: str) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the tensors of a parameter's state, each after its name in the checkpoint.

        ``path`` is the name of the parameter in the checkpoint.
        """
        _, local = parameter
        for kind, tensor in state_of(self._optimizer, local.tensor.name).items():
            # Powers of beta are one number, also for a shard of the parameter.
            sharded = list(tensor.shape) == list(local.tensor.shape) and "pow" not in kind
            yield state_name(path, kind), LocalTensor(tensor, local.cut if sharded else None)
        master = master_weight_of(self._optimizer, local.tensor.name)
        if master is not None:
            yield TensorName(MASTER_WEIGHTS, path), LocalTensor(master, local.cut)


def _require_no_other_state(optimizer: Optimizer) -> None:
    """Checks that an optimizer has no state that a checkpoint would lack.

    Raises:
        ConfigError: It wraps another optimizer, such as LookAhead does, or stores further tensors,
            and the script does not allow this.
    """
    job, kind = current_job(), type(optimizer)
    allow = Allow() if job is None else job.allow
    inner = [v for v in vars(optimizer).values() if isinstance(v, paddle.optimizer.Optimizer)]
    if inner:
        allow.refuse(
            "optimizer",
            kind.__name__,
            f"no checkpoint has the state of what {kind.__name__} wraps, nor what it counts by "
            "itself",
            cause=f"it is around {type(inner[0]).__name__}, whose state is apart from its own",
            fix="pass the optimizer inside of it to fleetpipe",
        )
    # The methods of Paddle's and PaddleNLP's optimizers name all attributes that these set.
    stock = next((k for k in kind.__mro__ if k.__module__.partition(".")[0] in _PADDLES), object)
    of_stock = names_used_in_class(stock)
    for name, value in vars(optimizer).items():
        if name not in of_stock and _has_tensors(value):
            allow.refuse(
                "state",
                f"{kind.__name__}.{name}",
                "no checkpoint has the tensors that an optimizer keeps by itself",
                fix="keep them by its _add_accumulator, as Paddle's own do",
            )


def _has_tensors(value: object) -> bool:
    """Returns whether a value is or contains a tensor that is not a parameter."""
    if isinstance(value, (dict, list, tuple)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, paddle.Tensor) and not is_parameter(value)


def _require_optimizer_type(kind: str, saved: Saved) -> None:
    """Raises ``CheckpointError`` if the saved state is of another type of optimizer."""
    # AdamW is Adam with another decay, and has the same state.
    if saved.optimizer is None or saved.optimizer.rstrip("W") != kind.rstrip("W"):
        raise CheckpointError(
            "the checkpoint has no state of this optimizer",
            expected=kind,
            got=saved.optimizer or "no optimizer",
            fix="build the optimizer that was saved, or restore the model without optimizer=",
        )


def state_name(path: str, kind: str) -> TensorName:
    """Returns the name in a checkpoint of an accumulator.

    Args:
        path: The fully qualified name of the parameter.
        kind: Paddle's name of the kind of accumulator, such as ``moment1``.
    """
    return TensorName(OPTIMIZER, f"{path}/{kind}{_ACCUMULATOR_SUFFIX}")


def _saved_state_names(saved: Saved) -> dict[str, set[TensorName]]:
    """Returns the names of the saved state of each parameter, by the parameter's name."""
    names: dict[str, set[TensorName]] = {}
    for name in saved.tensors:
        if name.group == OPTIMIZER:
            parameter, _, _ = name.name.rpartition("/")
            names.setdefault(parameter, set()).add(name)
        elif name.group == MASTER_WEIGHTS:
            names.setdefault(name.name, set()).add(name)
    return names


def _require_state_kinds(path: str, kinds: set[TensorName], saved: set[TensorName]) -> None:
    """Raises ``CheckpointError`` if a parameter's state has other tensors in the checkpoint.

    Args:
        path: The name of the parameter.
        kinds: The names of its state here.
        saved: The names of its state in the checkpoint.
    """
    if kinds != saved:
        raise CheckpointError(
            f"the saved state of {path!r} is of an optimizer with other options",
            expected=", ".join(sorted(map(str, kinds))) or "nothing",
            got=", ".join(sorted(map(str, saved))) or "nothing",
            fix="build the optimizer as it was when it was saved (amsgrad, multi_precision)",
        )


class ProgramState(NamedTensors):
    """The parameters and running statistics of the stages of a static program in this process.

    Attributes:
        program: The description of the program.
    """

    def __init__(self, program: ProgramSource) -> None:
        super().__init__(program.parts)
        self.program = program

    def saved_names(self, saved: Saved) -> Mapping[str, str]:
        """Returns the name in a checkpoint of each tensor of the whole program.

        Raises:
            CheckpointError: The tensors cannot be matched.
            ConfigError: The names differ, and the script has not said how to match them.
        """
        order = self.order()
        if set(order) != set(saved.order) and not self.program.by_order:
            missing_there = [name for name in order if name not in saved.order]
            missing_here = [name for name in saved.order if name not in order]
            raise ConfigError(
                "the program and the checkpoint call parameters by other names",
                expected=_shown_names(missing_there, "of the program"),
                got=_shown_names(missing_here, "of the checkpoint"),
                cause="Paddle counts the names of static parameters, and versions count otherwise",
                fix='CheckpointManager(.., names={"name in the program": "name in the '
                'checkpoint", ..}); names="order", where both declare the same layers in the '
                "same order",
            )
        return super().saved_names(saved)

    def optimizer(self, optimizer: Optimizer) -> ProgramOptimizer:
        """Returns the state of the optimizer of the program's ``minimize``.

        Raises:
            ConfigError: ``optimizer`` is another optimizer.
        """
        minimized_by = unwrap(self.program.minimized_by)
        if unwrap(optimizer) is not minimized_by:
            raise ConfigError(
                "the program was minimized by another optimizer",
                expected=f"that {type(self.program.minimized_by).__name__}, or what "
                "fleet.distributed_optimizer made of it",
                got=f"another {type(unwrap(optimizer)).__name__}",
                fix="pass the optimizer of which minimize(loss) was called",
            )
        return ProgramOptimizer(self.program, self)


class ProgramOptimizer(OptimizerState):
    """The optimizer's variables of a static program for the parameters of this process."""

    def __init__(self, program: ProgramSource, model: ProgramState) -> None:
        super().__init__(program.minimized_by, model)
        #: By parameter name, its accumulators by kind, and its master weight or None.
        self._by_parameter = program.optimizer_state()

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        """Yields each parameter's name and the tensors of its optimizer state, as a pair.

        The pair is a dict of accumulators by kind, such as ``moment1``, and the master weight or
        None.
        """
        yield from self._by_parameter.items()

    def _mark_without_state(self, parameter: Any, name: str) -> None:
        """Raises a ``CheckpointError`` for a parameter with state here and none in the save."""
        if dict(self._state_tensors(parameter, name)):
            raise CheckpointError(
                f"the checkpoint has no state of the optimizer for {name!r}",
                cause="it was saved before the first step, or did not train this parameter",
                fix="restore the model alone right after the startup program has run: "
                'only=("model",)',
            )

    def _create_state(self, parameter: Any) -> None:
        """Does nothing: the startup program has allocated the variables."""

    def _state_tensors(self, parameter: Any, path: str) -> Iterator[tuple[TensorName, LocalTensor]]:
        """Yields the variables of a parameter's state, each after its name in the checkpoint."""
        accumulators, master = parameter
        for kind, local in accumulators.items():
            yield state_name(path, kind), local
        if master is not None:
            yield TensorName(MASTER_WEIGHTS, path), master


def _shown_names(names: Sequence[str], whose: str) -> str:
    """Returns up to six names for an error, followed by ``whose``, such as "of the program"."""
    shown = ", ".join(names[:6]) + (", .." if len(names) > 6 else "")
    return f"{shown} {whose}" if names else f"nothing {whose}"

"""The optimizer of a pipeline, which wraps the user's optimizer for a job of several ranks.

Like Fleet's ``HybridParallelOptimizer``, it clips by the global norm of all ranks, and with
``sharding_degree`` above 1 each rank keeps its share of the state. The parameter groups of all
ranks are matched, and if a gradient overflows on one rank, all ranks skip the step. Start with
:class:`PipelineOptimizer`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from fleetpipe import log
from fleetpipe.aliases import Clip, Layer, Optimizer, Program, Scaler, Scheduler, Tensor
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.optimizer.clip_global import COPY, Pairs, norms_of, replace_clips, total_norm
from fleetpipe.dygraph.optimizer.replicas import Shards, reduce_all
from fleetpipe.errors import ConfigError, listed
from fleetpipe.job.job import current_job, pipeline_group
from fleetpipe.job.optimizer_table import require_optimizer
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import (
    mark_unscaled,
    rehearsal_dtype,
    replace_unscale,
    scale_of,
    scaler_counts,
    unscale,
)
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.distributed import in_data_parallel_mode
from fleetpipe.paddle_api.layer import has_unaveraged_gradients
from fleetpipe.paddle_api.optimizer import (
    GLOBAL_NORM_CLIPS,
    HybridParallelOptimizer,
    base_optimizer,
    clips_of_a_step,
    dict_groups,
    gradient_clip,
    learning_rate_of,
    optimized_parameters,
    options_of,
    put_groups,
    wrapper_with_attribute,
)
from fleetpipe.representation import shows

#: What identifies a parameter group on all ranks: its options as text, its number among the groups
#: with these options, and the largest norm that its clip allows, or None without a clip.
GroupKey = tuple[str, int, float | None]
#: In a group of which this rank has no parameters, the name of the item with the group's key.
_KEY = "key"

_log = log.logger(__name__)

#: The result of Paddle's ``minimize``: operators, and pairs of parameter and gradient.
Stepped = tuple[Sequence[object], Pairs]


def group_keys_of(optimizer: Optimizer) -> list[GroupKey] | None:
    """Returns the keys of the parameter groups; None if the parameters are a plain list."""
    groups = dict_groups(optimizer)
    if not groups:
        return None if optimized_parameters(optimizer) else []
    seen: Counter[str] = Counter()
    keys: list[GroupKey] = []
    for group in groups:
        if _KEY in group:
            keys.append(group[_KEY])
            continue
        options = str(sorted((n, text_of(v)) for n, v in group.items() if n != "params"))
        clip = group["grad_clip"]
        norm = clip.clip_norm if isinstance(clip, GLOBAL_NORM_CLIPS) else None
        keys.append((options, seen[options], norm))
        seen[options] += 1
    return keys


def arrange_groups(optimizer: Optimizer, keys_of_ranks: Sequence[list[GroupKey] | None]) -> None:
    """Gives an optimizer the parameter groups of all ranks, in one order.

    A group of which this rank has no parameters is added empty. Nothing happens if some rank has a
    plain list of parameters.

    Args:
        optimizer: This rank's optimizer.
        keys_of_ranks: The result of :func:`group_keys_of` on each rank.
    """
    if None in keys_of_ranks:
        return
    groups = dict(zip(group_keys_of(optimizer) or [], dict_groups(optimizer)))
    all_keys = dict.fromkeys(key for keys in keys_of_ranks for key in keys or [])
    if [*all_keys] != [*groups]:
        put_groups(optimizer, [groups.get(key) or _empty_group(key) for key in all_keys])


def _empty_group(key: GroupKey) -> dict[str, Any]:
    """Returns a group without parameters, whose clip takes part in the norm of the group."""
    norm = key[2]
    clip = None if norm is None else paddle.nn.ClipGradByGlobalNorm(norm)
    return {"params": [], "grad_clip": clip, "weight_decay": None, _KEY: key}


def text_of(value: object) -> str:
    """Returns an option or a clip as text: its ``str``, or its class if that has an address."""
    try:
        text = str(value)
    except NotImplementedError:
        text = ""
    return type(value).__name__ if not text or " at 0x" in text else text


def make_ranks_agree(scaler: Scaler) -> Scaler:
    """Changes a ``GradScaler`` so that it steps only if no rank's gradients overflow; returns it.

    Args:
        scaler: Paddle's ``GradScaler``, or its ``MixPrecisionScaler`` around one.
    """
    replace_unscale(scaler, _unscale)
    return scaler


def prepare_scaler(scaler: Scaler) -> Scaler:
    """Returns the scaler for ``train_batch`` to use; None if the scaler is off.

    Paddle's scaler switches itself off in ``scale`` on some devices and dtypes. Only the owner of
    the last stage scales a loss, so each rank scales a number here, and all switch alike.
    """
    if scaler.is_enable():
        scaler.scale(paddle.zeros([1]))
    if scaler.is_enable():
        return make_ranks_agree(scaler)
    if device_kind() == "cpu" and rehearsal_dtype() is None:
        log.once(
            _log.warning,
            "a GradScaler does nothing on CPU: gradients are computed in float32 there",
        )
    return None


@paddle.no_grad()
def _unscale(scaler: Scaler, optimizer: Optimizer) -> None:
    """Replaces a scaler's ``unscale_``: all ranks decide together whether to step. Collective."""
    if not scaler.is_enable():
        return
    gradients = map(gradient_of, optimized_parameters(optimizer))
    overflow = unscale((one for one in gradients if one is not None), scale_of(scaler))
    mark_unscaled(scaler, optimizer, _overflows_anywhere(overflow, scaler))


def _overflows_anywhere(found_inf: bool, scaler: Scaler) -> bool:
    """Returns whether any rank has a gradient that is not finite. Collective over the job.

    Raises:
        ConfigError: The scalers of the ranks are in different states.
    """
    job = current_job()
    if job is None:
        return found_inf
    everyone = job.everyone()
    verdicts = everyone.all_gather((found_inf, str(scaler_counts(scaler))))
    states = [state for _, state in verdicts]
    different = [rank for rank, state in enumerate(states) if state != states[0]]
    if different:
        raise ConfigError(
            f"the GradScalers of ranks 0 and {different[0]} are not in the same state",
            expected=f"as on rank 0: {states[0]}",
            got=f"on rank {different[0]}: {states[different[0]]}",
            fix="give all ranks the same GradScaler arguments, and load the same state on each",
        )
    return any(verdict for verdict, _ in verdicts)


class _HiddenMethod:
    """Replaces a method of the base class, so that Python calls ``__getattr__`` for its name.

    A property would not let trainers set the name: PaddleFormers' Trainer sets ``_insert_sync``,
    which nothing here calls.
    """

    def __get__(self, optimizer: Any, kind: type[Any]) -> NoReturn:
        raise AttributeError


#: Fleet's type without its methods.
_Hidden: Any = type(
    "_Hidden",
    (HybridParallelOptimizer,),
    {
        name: _HiddenMethod()
        for name, value in vars(HybridParallelOptimizer).items()
        if callable(value) and not name.startswith("__")
    },
)


class FleetsType(_Hidden):  # type: ignore[misc]
    """Fleet's type for ``isinstance``, with flags by which trainers reduce gradients, or not.

    Attributes:
        _dp_enable: Whether a trainer must reduce the replicas' gradients before a step: never.
        _sep_enable: Whether it must reduce gradients over the axis ``sep``: never.
        _sharding_enable: Whether it must reduce gradients for a sharded optimizer: never.
    """

    _dp_enable = False
    _sep_enable = False
    _sharding_enable = False


@shows("wrapped", learning_rate="_rate")
class PipelineOptimizer(FleetsType):
    """Steps the user's optimizer once per batch; other attributes are those of that optimizer.

    The optimizer of a rank has the parameters of the rank's stages; if one process plays all ranks,
    its optimizer has all parameters. A ``ClipGradByGlobalNorm`` of the user's optimizer is
    replaced.

    Attributes:
        shards: The owner of each parameter's state; None if each rank keeps the state of all.
        clips_all: Whether every gradient is clipped by the global norm, since the optimizer was
            bound.
    """

    shards: Shards | None = None
    clips_all = False

    def __init__(self, optimizer: Optimizer) -> None:
        """Wraps an optimizer built on ``model.parameters()``.

        Args:
            optimizer: Any Paddle optimizer, or Paddle's ``MixPrecisionOptimizer`` around one.

        Raises:
            ConfigError: The optimizer cannot step once for each batch, or is not known to be right
                where ranks hold parts of a model.
        """
        if optimizer is None:
            raise ConfigError(
                "there is no optimizer on this rank, and others wait for it in each step",
                fix="build it on every rank alike, with parameters=[] where there are none",
            )
        if isinstance(optimizer, paddle.optimizer.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times in each step, a pipeline once",
                fix="use an optimizer that steps from the gradients alone",
            )
        self._inner_opt = optimizer
        self._layers: Layer = None
        self._compared = False
        job = current_job()
        if job is not None:
            require_optimizer(optimizer, job)
        #: The first learning rate: a checkpoint compares it with the current rate of the script.
        self.first_rate = learning_rate_of(optimizer)
        self._hcg = None if job is None else job.hcg
        if job is not None and job.sharding().ranks > 1:
            sharing = job.sharding(), job.expert_sharding()
            self.shards = Shards(optimizer, *sharing, scatters=job.scatters_gradients)
        self._replace_clips()

    @property
    def wrapped(self) -> Optimizer:
        """The user's optimizer."""
        return self._inner_opt

    def owns_state(self, parameter: Tensor) -> bool:
        """Whether this rank keeps the optimizer's state of a parameter."""
        return self.shards is None or self.shards.owns(parameter)

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients of all ranks in the last step, before clipping.

        If each of several parameter groups is clipped by its own norm, this is the norm over all
        clipped groups. None before the first step, and if nothing is clipped by the global norm.
        """
        return total_norm(norms_of(self._clips))

    @property
    def _param2rank(self) -> dict[str, int]:
        """The sharding rank that keeps the state of each parameter, by name. Trainers read it."""
        return {} if self.shards is None else self.shards.ranks_by_name()

    def bind(self, layers: Layer) -> None:
        """Binds this optimizer to ``layers``; refuses optimizers that do not fit on all ranks.

        Collective over the job the first time it is called with these layers; this rank's own
        checks come before it waits.

        Args:
            layers: The ``PipelineLayer`` of the next batch.

        Raises:
            ConfigError: The optimizer was built on other parameters, or another rank has an
                optimizer of another type, with other groups or another clip.
        """
        if self._layers is not layers:
            _require_no_foreign(layers, optimized_parameters(self._inner_opt))
            self._compare_with_other_ranks(layers)
        self._adopt_changes()

    def _adopt_changes(self) -> None:
        """Adopts clips and parameter groups that the script has set since the last step.

        Collective if there are any, and in the first step of an optimizer without a bound model.
        """
        clips = clips_of_a_step(self._inner_opt)
        same = len(clips) == len(self._clips_of_step) and all(
            map(operator.is_, clips, self._clips_of_step)
        )
        if not same or not (self._compared or pipeline_group().ranks == 1):
            self._replace_clips()
            self._compare_with_other_ranks(self._layers)

    def _compare_with_other_ranks(self, layers: Layer | None) -> None:
        """Compares this optimizer with other ranks' and with a model, if any. Collective."""
        job = current_job()
        if job is not None:
            with job.calling("compares the optimizers"):
                optimized = optimized_parameters(self._inner_opt)
                trains = _has_parameters_of(layers, optimized)
                ranks = job.everyone().all_gather((trains, group_keys_of(self._inner_opt)))
                verdicts = [verdict for verdict, _ in ranks]
                if False in verdicts and True not in verdicts:
                    count = len(optimized)
                    _refuse_parameters(layers, f"none of them, {count} in all, on any rank")
                arrange_groups(self._inner_opt, [keys for _, keys in ranks])
                self._replace_clips()
                job.require_agreement(self._facts_to_compare())
        for clip in self._clips:
            clip.orders = {} if layers is None else _orders_of_parameters(layers)
        self._compared, self._layers = True, layers

    def step(self) -> None:
        """Updates this process's parameters. Collective in a job of several ranks.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        self._adopt_changes()
        self._reduce_and_step(self._inner_opt.step, lambda: clips_of_a_step(self._inner_opt))

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state into the user's optimizer.

        Raises:
            ConfigError: The state has other parameters only, such as those of another rank.
        """
        names = [parameter.name for parameter in optimized_parameters(self._inner_opt)]
        tensors = [name for name in state if name not in ("LR_Scheduler", "master_weights")]
        if names and tensors and not any(t.startswith(f"{n}_") for t in tensors for n in names):
            raise ConfigError(
                "the state is of other parameters than this optimizer has",
                expected=f"the state of {listed(names)}",
                got=listed(tensors),
                cause="a rank's optimizer has the state of the parameters of its own stages",
                fix="load on each rank what it has saved itself; a CheckpointManager restores "
                "under any layout",
            )
        self._inner_opt.set_state_dict(state)

    load_state_dict = set_state_dict

    def _step(self, parameters_list: Sequence[Tensor]) -> None:
        """Steps like :meth:`step`, for a trainer that lists the parameters to update."""
        parameters = optimized_parameters(self._inner_opt)
        if {id(parameter) for parameter in parameters_list} != {id(p) for p in parameters}:
            raise ConfigError(
                "_step updates all parameters of the optimizer",
                expected=listed([parameter.name for parameter in parameters]),
                got=listed([parameter.name for parameter in parameters_list]),
                fix="build the optimizer on what is to be trained",
            )
        self.step()

    def minimize(
        self,
        loss: Tensor,
        startup_program: Program = None,
        parameters: Sequence[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
    ) -> Stepped:
        """Steps like :meth:`step`, with the gradients that ``loss.backward()`` has computed.

        Args:
            loss: Accepted as Fleet accepts it.
            startup_program: Accepted as Fleet accepts it.
            parameters: The parameters to update, or their names; None for all.
            no_grad_set: Parameters, or their names, to leave out.

        Returns:
            Paddle's operators (none in dynamic graph), and the pairs of parameter and gradient.
        """

        def minimize() -> Stepped:
            """Steps the wanted parameters; without any, only takes part in the clip."""
            optimized = optimized_parameters(self._inner_opt)
            wanted = _names(parameters or optimized) - _names(no_grad_set or ())
            chosen = [parameter for parameter in optimized if parameter.name in wanted]
            if not chosen:
                # Paddle would take an empty list for all parameters.
                self._clip_nothing([gradient_clip(self._inner_opt)])
                return [], []
            stepped: Stepped = self._inner_opt.minimize(loss, startup_program, chosen)
            return stepped

        self._adopt_changes()
        result = self._reduce_and_step(minimize, lambda: [gradient_clip(self._inner_opt)])
        return ([], []) if result is None else result

    def _facts_to_compare(self) -> dict[str, str]:
        """Returns texts that must be equal on all ranks, by their names in messages."""
        keys = group_keys_of(self._inner_opt)
        clips = [*map(text_of, clips_of_a_step(self._inner_opt))]
        return {
            "optimizer": type(base_optimizer(self._inner_opt)).__name__,
            "gradient clip of each parameter group": str(keys or clips),
            **{f"{n} of the optimizer": v for n, v in options_of(self._inner_opt).items()},
        }

    def _replace_clips(self) -> None:
        """Replaces the clips of the user's optimizer; gives new parameters an owner."""
        self._clips = replace_clips(self._inner_opt)
        self._clips_of_step = clips = clips_of_a_step(self._inner_opt)
        if self.shards is not None:
            self.shards.assign_new_parameters()
        self.clips_all = bool(clips) and all(clip in self._clips for clip in clips)
        spread = any(map(is_spread, optimized_parameters(self._inner_opt)))
        for clip in self._clips:
            clip.sharded, clip.spread = self.shards is not None, spread

    def _reduce_and_step(
        self, step: Callable[[], Stepped | None], clips: Callable[[], list[Clip]]
    ) -> Stepped | None:
        """Reduces gradients, and steps. Collective in a job of several ranks.

        Args:
            step: Steps the user's optimizer.
            clips: Returns the clips of the step. A rank without parameters only takes part in their
                norms.

        Returns:
            The result of ``step``; None without parameters.
        """
        parameters = optimized_parameters(self._inner_opt)
        self._reduce_gradients(parameters)
        for clip in self._clips:
            clip.begin()
        stepped = None
        if self.shards is not None:
            stepped = self.shards.step(step, lambda: self._clip_nothing(clips()))
        elif parameters:
            stepped = step()
        else:
            self._clip_nothing(clips())
        job = current_job()
        if job is not None and self._clips:
            norm = partial(total_norm, norms_of(self._clips))
            job.progress.tell_norm(norm, waits=device_kind() != "cpu")
        return stepped

    def _clip_nothing(self, clips: Sequence[Clip]) -> None:
        """Takes part in the norms over all ranks of ``clips``, without gradients of this rank."""
        for clip in clips:
            if clip in self._clips:
                clip([])

    def _reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Reduces the gradients of a model that is no pipeline, as Fleet does. Collective.

        Gradients are added up along sep, since each of its ranks has a part of a loss, and averaged
        over the other copies. A pipeline reduces them at the end of its batch, and Paddle's
        ``DataParallel`` in backward unless ``no_sync`` is on. A second average changes nothing.
        """
        job = current_job()
        if job is None or job.copies().ranks == 1:
            return
        if in_data_parallel_mode(job.hcg) and not has_unaveraged_gradients(parameters):
            return
        if self._layers is None and not job.trains(parameters):
            reduce_all(parameters, job, job.degrees.sep / job.copies().ranks, self.shards)

    @property
    def _rate(self) -> float | Scheduler:
        """The learning rate or the scheduler, for the ``repr``."""
        return learning_rate_of(self._inner_opt)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute: of the user's optimizer if that has it, such as ``_grad_clip``."""
        inner = vars(self).get("_inner_opt")
        stays = inner is None or name in vars(self) or hasattr(type(self), name)
        owner = None if stays else wrapper_with_attribute(inner, name)
        object.__setattr__(self if owner is None else owner, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner_opt":
            raise AttributeError(name)
        return getattr(self._inner_opt, name)


def _names(parameters: Iterable[Tensor | str]) -> set[str]:
    """Returns the names of parameters, of which some may be given by name."""
    return {parameter if isinstance(parameter, str) else parameter.name for parameter in parameters}


def _require_no_foreign(layers: Layer, optimized: Sequence[Tensor]) -> None:
    """Refuses an optimizer, of the parameters ``optimized``, if one is not of the model."""
    trained_ids = {id(parameter) for parameter in layers.trained_parameters()}
    foreign = [p.name for p in optimized if id(p) not in trained_ids and not p.stop_gradient]
    if foreign:
        _refuse_parameters(layers, listed(foreign))


def _has_parameters_of(layers: Layer | None, optimized: Sequence[Tensor]) -> bool | None:
    """Whether an optimizer of some parameters has one of this rank's stages of a model.

    The result is None if all parameters of these stages are frozen, True if there is no model.
    """
    if layers is None:
        return True
    of_stages = {id(p): p for p in layers.state.own_parameters().values()}
    if any(id(parameter) in of_stages for parameter in optimized):
        return True
    return None if all(p.stop_gradient for p in of_stages.values()) else False


def _refuse_parameters(layers: Layer, got: str) -> NoReturn:
    """Refuses an optimizer of other parameters; ``got`` describes these."""
    trained = [p.name for p in layers.state.own_parameters().values() if not p.stop_gradient]
    raise ConfigError(
        "the optimizer was built on the wrong parameters",
        expected=f"parameters of this rank's stages, {listed(trained)}",
        got=got,
        cause="it was built on another model, on the layers before PipelineLayer built its own, or "
        "on a parameter of no layer in the list",
        fix="build it on model.parameters() of the fleetpipe.Model or PipelineLayer, or of what "
        "distributed_model returned",
    )


def _orders_of_parameters(layers: Layer) -> dict[int, int]:
    """Returns the number of each parameter in the single-device model, by ``id``.

    The number of a copy of a tied weight that another rank counts is COPY.
    """
    positions = layers.state.positions()
    return {
        id(tensor): positions[name] if getattr(tensor, "is_firstly_shared", True) else COPY
        for name, tensor in layers.state.local_tensors().items()
    }

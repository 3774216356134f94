"""Reads the switches of ``hybrid_configs["pp_configs"]`` that have an effect here.

Most of Fleet's switches tune how values are sent on a GPU, and change no result. fleetpipe accepts
them without effect: ``dp_comm_overlap, sharding_comm_overlap, overlap_p2p_comm, use_batch_p2p_comm,
clear_every_step_cache, enable_dynamic_shape`` (shapes may always change), ``enable_offload_queue,
best_unbalanced_scheduler, sync_param, sync_moment, sync_mode`` (copies of a tied weight are equal
in every bit anyway) and the ``*_nccl_config``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetpipe.aliases import Layer, Strategy
from fleetpipe.errors import ConfigError


@dataclass(frozen=True)
class Switches:
    """The switches of ``pp_configs`` with an effect; those that Paddle 2.6.2 lacks are off there.

    Attributes:
        delay_scale_loss: Backward starts from undivided losses, and the gradients are divided by
            the number of micro-batches before the optimizer steps.
        enable_timer: Forward, backward, transfers and reductions are timed, and logged each step.
        release_gradients: Gradients are freed after a step instead of being set to zero.
        best_unbalanced_scheduler: Another type of wrapper is returned, as in Fleet.
    """

    delay_scale_loss: bool = False
    enable_timer: bool = False
    release_gradients: bool = False
    best_unbalanced_scheduler: bool = False

    @classmethod
    def from_strategy(cls, strategy: Strategy, model: Layer) -> Switches:
        """Reads the switches of ``strategy`` for ``model``.

        Raises:
            ConfigError: ``forward_backward_overlap_scheduler`` is on for a model that would use it.
        """
        configs = strategy.hybrid_configs["pp_configs"]
        overlaps = getattr(configs, "forward_backward_overlap_scheduler", False)
        # Fleet too takes notice only where the model's class has this method.
        if overlaps and hasattr(type(model), "overlapped_forward_backward"):
            raise ConfigError(
                "forward_backward_overlap_scheduler is not run here",
                got=f"{type(model).__name__}.overlapped_forward_backward",
                cause="it hands the order within a forward and a backward over to the model",
                fix="leave it out; schedule_mode DualPipeV or ZBV splits backward for any model",
            )
        return cls(**{name: bool(getattr(configs, name, False)) for name in cls.__annotations__})

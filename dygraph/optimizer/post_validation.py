"""Steps before the norm of all gradients is known, and takes a step back that was clipped.

A global norm has every rank wait for the last one before it may step. Under ZBH2 and ZBV the ranks
end one after another, and all but the last would have their step done by then. So a rank whose own
gradients give no reason to clip goes on as if nothing were clipped; when the others' norms have
come, it keeps its step or puts back what the step has changed and steps again. Either way the bits
are those of a step that waited.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 4. There the
check comes within the next batch; here before the call of the step returns, so that nobody sees
parameters that may be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.dygraph.optimizer.clip_global import GlobalNormClip
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import (
    all_state_of,
    clips_of_a_step,
    has_known_state,
    optimized_parameters,
)

Result = TypeVar("Result")


class PostValidation:
    """Runs the steps of an optimizer whose norms are checked afterwards.

    A step waits for the norm first where the rank has all norms anyway, where its own gradients are
    clipped, where the step before was clipped, and where a parameter steps for the first time, for
    which the optimizer has no state yet that could be put back.

    Attributes:
        ahead: How many steps did not wait.
        taken_back: How many of these were clipped after all.
    """

    def __init__(self, optimizer: Optimizer, clips: Sequence[GlobalNormClip]) -> None:
        """Has the clips of an optimizer ask whether to wait.

        Args:
            optimizer: A Paddle optimizer, or Paddle's ``MixPrecisionOptimizer`` around one.
            clips: All of its clips by the norm of all ranks.
        """
        self.ahead = self.taken_back = 0
        self._optimizer = optimizer
        self._clips = clips
        self._stepped: set[str] = set()
        self._clipped = False
        self._untouched = False
        # By the id of a tensor, it and its copy. They stay from step to step: to get the memory for
        # a copy takes longer than the step.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._ahead = False
        for clip in clips:
            clip.assume = self._assume

    def step(self, step: Callable[[], Result]) -> Result:
        """Steps. Collective where the clips are.

        Args:
            step: Steps the optimizer; it may run twice.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        # Without it the first group of parameters has stepped before a clip asks.
        self._untouched = isinstance(clips_of_a_step(self._optimizer)[0], GlobalNormClip)
        try:
            result = step()
            if self._ahead:
                self.ahead += 1
                if all(clip.right() for clip in self._clips):
                    for clip in self._clips:
                        clip.accept()
                else:
                    self._put_back()
                    result = step()
        finally:
            self._ahead = self._untouched = False
        self._stepped.update(parameter.name for parameter in self._stepping())
        self._clipped = any(clip.clipped for clip in self._clips)
        return result

    def _assume(self, waits: Callable[[], bool]) -> bool:
        """Whether a clip goes on as if nothing were clipped; the first time keeps the state."""
        if self._ahead:
            return waits()
        untouched, self._untouched = self._untouched, False
        if not untouched or self._clipped or not has_known_state(self._optimizer):
            return False
        stepping = self._stepping()
        if not self._stepped.issuperset(p.name for p in stepping) or not waits():
            return False
        self._keep([*stepping, *all_state_of(self._optimizer)])
        self._ahead = True
        return True

    @paddle.no_grad()
    def _keep(self, tensors: Sequence[Tensor]) -> None:
        before, self._copies = self._copies, {}
        for tensor in tensors:
            _, copy = before.get(id(tensor), (None, None))
            if copy is None:
                copy = tensor.detach().clone()
            else:
                paddle.assign(tensor, copy)
            self._copies[id(tensor)] = tensor, copy

    @paddle.no_grad()
    def _put_back(self) -> None:
        self.taken_back += 1
        for tensor, copy in self._copies.values():
            paddle.assign(copy, tensor)
        for clip in self._clips:
            clip.again()

    def _stepping(self) -> list[Tensor]:
        """Returns the parameters that have a gradient."""
        return [p for p in optimized_parameters(self._optimizer) if gradient_of(p) is not None]

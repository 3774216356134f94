"""Splits the backward of stages into I and W: keeps a tape of leaf calls for each micro-batch.

Where nothing is split, leaf layers with a faster way to the same bits go that (``fast``).

While a stage whose backward is split runs forward, the ``forward`` of its leaf layers is replaced
by ``leaf_run.run``; outside of that nothing is changed, so evaluation and the user's own calls
run as ever. I runs autograd as B does, and finds at each leaf only the way to its inputs; W empties
the tape.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.backward import leaf_run
from fleetpipe.dygraph.backward.adding import Sums
from fleetpipe.dygraph.backward.deferral_report import (
    DeferralReport,
    GradientArrivals,
    LayersOf,
    Waiting,
)
from fleetpipe.dygraph.backward.fast.forwards import FastForwards, replaced
from fleetpipe.dygraph.backward.leaf import Leaf, leaves_of
from fleetpipe.dygraph.backward.leaf_call import Call, Tape
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import MicroBatch, flatten

_NOTHING = nullcontext()


class SplitBackward:
    """The tapes of all stages and micro-batches whose backward a schedule splits."""

    def __init__(self, schedule: Schedule, layers_of: LayersOf, fast_leaves: bool = True) -> None:
        """Finds out what is split.

        Args:
            schedule: Actions I and W name the stages and micro-batches that are split.
            layers_of: The layers of a stage of this process.
            fast_leaves: Whether leaf layers may take another way to the same bits where a
                backward is not split.
        """
        self._split = {
            (action.stage, MicroBatch(action.micro_batch))
            for row in schedule.actions
            for action in flatten(row)
            if action.kind == "I"
        }
        self._name = schedule.name
        self._layers_of = layers_of
        self._leaves: dict[int, list[Leaf]] = {}
        self._fast_leaves = fast_leaves
        self._fast: dict[int, FastForwards] = {}
        self._tapes: dict[tuple[int, MicroBatch], Tape] = {}
        self._waiting: dict[int, Waiting] = {}
        self._sums = Sums()
        self._arrivals: GradientArrivals | None = None

    def end(self) -> None:
        """Takes the hooks away after the first batch, and forgets what an unfinished one left."""
        if self._sums.begun:
            self._sums.end()
        if self._arrivals is not None:
            self._arrivals.stop()
            if self._tapes:
                # They saw a part of the parameters: the next batch has new ones from its beginning.
                self._arrivals = None
        self._tapes.clear()
        for waiting in self._waiting.values():
            waiting.forget()

    def recording(self, stage: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Has the stage's leaf layers run in their own ways while the context is open.

        Where the backward is split, it cuts their calls out of the graph.

        Args:
            stage: Global stage of this process.
            micro_batch: Number within the batch.
        """
        if (stage, micro_batch) not in self._split:
            return self._fast_of(stage).running() if self._fast_leaves else _NOTHING
        tape = self._tapes.setdefault((stage, micro_batch), Tape())
        # What cannot wait in one call does not in any other.
        leaves = [leaf for leaf in self._leaves_of(stage) if leaf.waits and not leaf.static]
        run = functools.partial
        return replaced(
            [(leaf.layer, run(leaf_run.run, leaf, leaf.layer.forward, tape)) for leaf in leaves]
        )

    def in_backward(self, stage: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """As :meth:`recording` for a backward that is not split, and what runs again in it."""
        if (stage, micro_batch) in self._split or not self._fast_leaves:
            return _NOTHING
        return self._fast_of(stage).in_backward(self._sums)

    def _fast_of(self, stage: int) -> FastForwards:
        if stage not in self._fast:
            leaves = self._leaves_of(stage)
            self._fast[stage] = FastForwards(leaf.layer for leaf in leaves if not leaf.static)
        return self._fast[stage]

    @contextmanager
    def input_grads(self, stage: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Has autograd leave the leaf layers' weight gradients out while the context is open."""
        tape = self._tapes[stage, micro_batch]
        tape.in_backward = True
        with self._noted(stage, "I"), self.recording(stage, micro_batch):
            yield
        tape.in_backward = False
        calls = tape.calls
        if not all(call.leaf.waits for call in calls):
            # Autograd has just added those of other calls of these layers.
            with paddle.no_grad():
                self._add([call for call in calls if not call.leaf.waits])
            calls[:] = [call for call in calls if call.leaf.waits]
        # What the same calls share counts once.
        storages = {address: size for call in calls for address, size in call.storages.items()}
        hidden = sum(call.hidden_bytes for call in calls)
        self._waiting.setdefault(stage, Waiting()).add(micro_batch, sum(storages.values()) + hidden)

    def weight_grads(self, stage: int, micro_batch: MicroBatch) -> None:
        """Adds to the parameters' gradients what I left over, as autograd would have."""
        tape = self._tapes[stage, micro_batch]
        with self._noted(stage, "W"), paddle.no_grad():
            self._add(tape.calls)
            tape.calls.clear()
        self._waiting[stage].remove(micro_batch)

    def _add(self, calls: Sequence[Call]) -> None:
        """Adds the weight gradients of calls of one micro-batch; autograd is off meanwhile."""
        uses = Counter(id(parameter) for call in calls for parameter in call.parameters)
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for call in calls:
            if all(uses[id(parameter)] == 1 for parameter in call.parameters):
                # At once: the memory of these gradients is free again for those of the next.
                call.add_weight_grads(self._sums)
                continue
            for parameter, grad in call.weight_grads():
                earlier = shared.get(id(parameter))
                # Autograd too adds up all uses before it touches the parameter's gradient.
                total = grad if earlier is None else earlier[1] + grad
                shared[id(parameter)] = (parameter, total)
        self._sums.add(list(shared.values()))

    def release(self, stage: int, micro_batch: MicroBatch) -> None:
        """Drops the tape of a stage and micro-batch."""
        self._tapes.pop((stage, micro_batch), None)

    def refusal(self, stage: int, micro_batch: MicroBatch) -> ConfigError | None:
        """Returns why the forward of a stage and micro-batch failed, if that is known here."""
        tape = self._tapes.get((stage, micro_batch))
        return None if tape is None else tape.refusal

    def report(self) -> DeferralReport:
        """Returns which parameters' gradients waited for W, and what that kept."""
        deferrals = () if self._arrivals is None else self._arrivals.deferrals(self._leaves)
        peaks = {stage: waiting.peak for stage, waiting in sorted(self._waiting.items())}
        return DeferralReport(self._name, deferrals, peaks)

    def reordered(self) -> list[str]:
        """Returns the leaf layers whose gradients may be added up in another order than in B.

        These are the ones whose inputs and outputs are connected in more than one way, and those
        whose parameters are also used around them.
        """
        both = set() if self._arrivals is None else self._arrivals.halves()
        return [
            leaf.name
            for leaves in self._leaves.values()
            for leaf in leaves
            if not all(nature.straight for nature in leaf.natures.values())
            or not both.isdisjoint(map(id, leaf.parameters))
        ]

    def _leaves_of(self, stage: int) -> list[Leaf]:
        if stage not in self._leaves:
            # Once each, however many entries of the stage share a layer.
            leaves: dict[int, Leaf] = {}
            for index, layer in self._layers_of(stage).items():
                for leaf in leaves_of(index, layer):
                    leaves.setdefault(id(leaf.layer), leaf)
            self._leaves[stage] = list(leaves.values())
        return self._leaves[stage]

    def _noted(self, stage: int, kind: str) -> AbstractContextManager[None]:
        """Notes which parameters of the first batch get their gradient in an action."""
        if self._arrivals is None:
            self._arrivals = GradientArrivals()
        return self._arrivals.during(stage, kind, self._layers_of)

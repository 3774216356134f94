"""The base class of a model whose layers are on several ranks: state, shared weights, files."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpipe import log
from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.state.names import ModelState, ModelWithParts
from fleetpipe.dygraph.state.tied_weights import SharedWeight, SharedWeights
from fleetpipe.dygraph.sums import Uses
from fleetpipe.errors import listed
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.parts import ModelParts

if TYPE_CHECKING:
    from fleetpipe.dygraph.state.files import LayerFiles

_log = log.logger(__name__)


class ModelOnRanks(ModelWithParts):
    """Saves and loads a model whose layers are on several ranks, and keeps shared weights equal.

    Attributes:
        state: The parameters and buffers of the whole model, under their fully qualified names.
    """

    state: ModelState
    _shared_weights: SharedWeights
    _job: Job | None

    def __init__(self) -> None:
        super().__init__()
        #: The number of saves into each folder so far; the same on every rank.
        self._saves: Counter[str] = Counter()

    @abstractmethod
    def holders(self) -> Group:
        """Returns the ranks that together hold the model."""

    @abstractmethod
    def _layer_files(self) -> LayerFiles:
        """Returns the object that writes and reads the files of this process's layers."""

    def own_state(self) -> dict[str, Tensor]:
        """Returns this process's parameters and buffers by their names in the whole model.

        The names are keys of :meth:`full_state_dict` too, except for parts of a vocabulary head,
        which is whole there. ``state_dict`` has Fleet's names, and some depend on the rank: those
        of weights whose layer is of another class than the first layer with its shared key.
        """
        return self.state.local_tensors()

    def load_from(self, source: Layer | Mapping[str, Any]) -> None:
        """Loads this process's parameters and buffers from a single-device model.

        Args:
            source: The model or its state dict. Names such as ``3.weight`` are matched by name.
                A model with other names is matched by order, and its shapes must agree. A
                vocabulary head has as many parts as in this model, or is whole.

        Raises:
            CheckpointError: The source does not fit; nothing was changed.
        """
        self.state.load(source)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns copies of all parameters and buffers of the whole model, on every rank.

        Collective over the pipeline. The keys are those of :meth:`own_state` on all ranks, each
        once. Shared layers come first, and a vocabulary head is whole. It leaves out buffers that a
        forward has registered: only checkpoints have these.
        """
        late = self.state.late_buffers()
        if late:
            text = f"full_state_dict leaves out {listed([*late])}, which a forward has registered"
            log.once(_log.warning, text, any_rank=True)
        with self._gathering("full_state_dict"):
            return self.state.gather()

    def whole_parameters(self, measure: Callable[[Tensor], Any] | None = None) -> dict[str, Any]:
        """Returns a value for each parameter of the whole model, by name, on every rank.

        ``parameters()`` has the parameters of this process. Collective over the pipeline.

        Args:
            measure: Called with each parameter on a rank that has it, or with this rank's shard of
                a tensor-parallel parameter. Returns a number, or another value that ranks can send;
                None for the shapes.

        Returns:
            The values by name, in the same order on every rank.
        """
        value_of = measure or (lambda parameter: list(parameter.shape))
        here = {name: value_of(p) for name, p in self.state.own_parameters().items()}
        merged: dict[str, Any] = {}
        with self._gathering("whole_parameters"):
            for of_rank in self.holders().all_gather(here):
                merged = {**of_rank, **merged}
        ordered = dict.fromkeys([*(slot.name for slot in self.state.slots()), *merged])
        return {name: merged[name] for name in ordered if name in merged}

    def copy_to(self, model: Layer) -> None:
        """Copies the whole pipeline's parameters and buffers to a single-device model.

        Collective over the pipeline; the inverse of :meth:`load_from`.

        Args:
            model: A Layer with the same parameters in the same order. Each rank may pass its own.

        Raises:
            CheckpointError: The model does not fit; nothing was changed.
        """
        with self._gathering("copy_to"):
            self.state.copy_to(model)

    def _gathering(self, method: str) -> AbstractContextManager[None]:
        """Returns the context of a collective call over the pipeline; ``method`` is its name."""
        words = f"gathers the state, by {method}"
        return nullcontext() if self._job is None else self._job.calling(words, replicas=False)

    def save_state_dict(self, path: str | Path) -> None:
        """Writes each layer of this process to a file of its own, named as Fleet names them.

        Every rank calls it, and the ranks of the first replica write. The file of a shared layer
        has the number of the first entry that calls the layer without a ``forward_func``, or of
        the first entry if none does. A vocabulary head has one file, which the first rank writes:
        then the call is collective over the pipeline. Files of a captured model have the plain
        model's names and order, and fit any cut.

        Args:
            path: A folder, which is made if it does not exist.

        Raises:
            ConfigError: Several ranks have parameters of one layer of a captured model.
        """
        self._saves[str(path)] += 1
        self._layer_files().save(path, self._saves[str(path)])

    def set_state_dir(self, path: str | Path) -> None:
        """Reads the files of this process's layers, and makes shared weights equal again.

        Collective over the pipeline if ranks share weights. Fleet's files can be read too.

        Args:
            path: The folder given to :meth:`save_state_dict`.

        Raises:
            CheckpointError: The folder or a file is missing, or does not fit its layer. The layers
                of this rank keep their values.
            ConfigError: Several ranks have parameters of one layer of a captured model.
            PipelineTimeout: Another rank did not come within the limit.
        """
        self._layer_files().load(path, self._shared_weights)

    def checkpoint_part(self) -> ModelParts:
        """Returns this process's parameters and buffers, described as a checkpoint needs them."""
        return self.state.checkpoint_part()

    def _synchronize_shared_weights(self) -> None:
        """Gives all copies of shared weights the values of the first copy.

        Libraries call this method of Fleet's after they have changed weights. Collective over the
        ranks of the pipeline that share a weight. Nothing happens on other ranks, or if one process
        has all uses.
        """
        if self._job is not None and self._shared_weights.weights:
            with self._job.guarded(lambda: "making shared weights equal"):
                self._shared_weights.equalize()

    @property
    def shared_weights(self) -> list[SharedWeight]:
        """The weights of which this rank and others of its pipeline hold copies."""
        return self._shared_weights.weights

    def allreduce_shared_weight_gradients(self) -> None:
        """Gives all copies of shared weights the sum of their gradients.

        Collective over the ranks of the pipeline that share a weight. Nothing happens on other
        ranks, or if one process has all uses. A copy without a gradient counts as zeros.
        ``train_batch`` calls this method.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        if self._shared_weights.weights:
            self._shared_weights.sum_gradients()

    def add_up_uses(self, uses: Uses) -> None:
        """Gives each parameter with several uses the sum of the gradients of all uses.

        With sums by a tree, each use has a gradient of its own, and this method is called instead
        of :meth:`allreduce_shared_weight_gradients`. It is collective like that.

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
        """
        uses.add_up()
        if self._shared_weights.weights:
            self._shared_weights.sum_gradients(uses.several)

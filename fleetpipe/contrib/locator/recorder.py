"""Gives the tensors of a process their keys, and stores them until the step is written.

The process is a rank of a job, or the job's twin: the same script on one device. A tensor's key
says what it is: its step, phase, layer, micro-batch, role (``TensorKey``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.compare.differences import numbers_of
from fleetpipe.contrib.experts import Experts
from fleetpipe.contrib.locator import record
from fleetpipe.contrib.locator.record import TensorKey
from fleetpipe.dygraph import PipelineLayer, tensors_of
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.job.job import current_job
from fleetpipe.mesh import AXES
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import wrapped_layer

#: The running statistics of a batch normalisation, which Paddle makes parameters.
_STATISTICS = ("_mean", "_variance")
_FLOATS = (paddle.float16, paddle.bfloat16, paddle.float32, paddle.float64)


class Finished(SystemExit):
    """Ends the script, as the wanted number of steps is recorded."""


class Recorder:
    """Collects the tensors of one process.

    Attributes:
        step: The present training step, from 0.
        micro_batch: The micro-batch of the present forward, within the step and replica.
        in_pipeline: Whether ``train_batch`` runs; the engine then sets the micro-batch.
        forwarding: Whether ``train_batch`` runs the forward of a micro-batch.
        recorded: The tensors of this step.
        made: Each output of a layer in this step and its key, by ``id()``. The dict holds the
            tensors, so that no other one gets the id.
        stored_phases: The phases of this step whose gradients are stored.
    """

    def __init__(self, folder: Path, steps: int, rank: int) -> None:
        """Creates a recorder.

        Args:
            folder: The folder into which it writes.
            steps: The number of steps after which it ends the script.
            rank: The rank of this process in the job.
        """
        self._folder = folder
        self._steps = steps
        self.recorded = record.RankTensors(rank, {})
        self.step = 0
        self.micro_batch = -1
        self.in_pipeline = False
        self.forwarding = False
        #: The models and losses, each with the prefix of its names.
        self._roots: list[tuple[str, Layer]] = []
        #: By id of a layer or parameter, its path or name.
        self._paths: dict[int, str] = {}
        self._parameter_names: dict[int, str] = {}
        #: How often each layer was called in a micro-batch.
        self._calls: Counter[tuple[str, int]] = Counter()
        self.made: dict[int, tuple[Tensor, TensorKey]] = {}
        #: By name, the last stored value of each parameter.
        self._last: dict[str, np.ndarray] = {}
        self.stored_phases: set[str] = set()

    # Models and parameters

    def add_root(self, root: Layer) -> bool:
        """Adds a model or a loss; returns whether it is new."""
        inner = wrapped_layer(root) or root
        if id(root) in self._paths or id(inner) in self._paths:
            return False
        trained = any(True for _ in inner.parameters())
        several = any(name == "" for name, _ in self._roots)
        prefix = "" if trained and not several else f"{type(inner).__name__}."
        while prefix in (name for name, _ in self._roots):
            prefix = f"{prefix[:-1]}'."
        self._roots.append((prefix, inner))
        self._paths[id(root)] = prefix.rstrip(".")
        spread: list[str] = []
        for path, layer in inner.named_sublayers(include_self=True):
            parameters = list(layer.parameters())
            spreads = isinstance(layer, Experts) and len(layer.experts) < layer.experts.total
            if spreads or (parameters and all(map(is_spread, parameters))):
                # The tokens and the calls of an expert come from all replicas: no single one's.
                spread.append(f"{path}.")
            if not f"{path}.".startswith(tuple(spread)):
                self._paths.setdefault(id(layer), f"{prefix}{path}".rstrip("."))
        for name, parameter in self.parameters().items():
            self._parameter_names[id(parameter)] = name
        return True

    @property
    def main_root(self) -> Layer | None:
        """The first model whose parameters are trained."""
        return next((root for prefix, root in self._roots if prefix == ""), None)

    def path_of(self, layer: Layer) -> str | None:
        """Returns the path of a layer; None for a wrapper and for a layer of no model."""
        return None if wrapped_layer(layer) is not None else self._paths.get(id(layer))

    def parameters(self) -> dict[str, Tensor]:
        """Returns all parameters of all models by name, each once."""
        named: dict[int, tuple[str, Tensor]] = {}
        for prefix, root in self._roots:
            is_pipeline = isinstance(root, PipelineLayer)
            of_root = root.state.own_parameters() if is_pipeline else dict(root.named_parameters())
            for name, parameter in of_root.items():
                named.setdefault(id(parameter), (prefix + name, parameter))
        return dict(named.values())

    def name_of(self, parameter: Tensor) -> str | None:
        """Returns the name of a parameter; None if it belongs to no model."""
        return self._parameter_names.get(id(parameter))

    # Tensors

    def store(self, key: TensorKey, tensor: Tensor | np.ndarray) -> None:
        """Stores a copy of a tensor."""
        array = tensor if isinstance(tensor, np.ndarray) else numbers_of(tensor.detach())
        self.recorded.tensors[key] = array

    def record_call(self, layer: Layer, inputs: Iterable[Nest], output: Nest) -> None:
        """Stores the outputs of a layer, and the inputs that are no output of another layer."""
        path = self.path_of(layer)
        if path is None:
            return
        layer_call = (path, self.micro_batch)
        call = self._calls[layer_call]
        self._calls[layer_call] += 1

        def key(role: str) -> TensorKey:
            return TensorKey(self.step, "forward", path, self.micro_batch, role, call)

        sources = []
        # A single number is a loss, whose rows depend on the micro-batch, and is left out; one
        # beside other outputs is compared where a micro-batch has the twin's rows.
        for number, tensor in enumerate(tensors_of(list(inputs))):
            source = self.made.get(id(tensor))
            if source is not None:
                sources.append(source[1])
            elif tensor.dtype in _FLOATS and math.prod(tensor.shape) > 1:
                self.store(key(f"input {number}"), tensor)
        outputs = list(tensors_of(output))
        for number, tensor in enumerate(outputs):
            if id(tensor) in self.made and self.made[id(tensor)][1].name == path:
                continue
            if math.prod(tensor.shape) == 1 and len(outputs) == 1:
                continue
            here = key(f"output {number}")
            self.store(here, tensor)
            self.recorded.sources[here] = sources
            if id(tensor) in self.made:
                # The output of another layer too: its gradient is also that of its earlier uses.
                continue
            self.made[id(tensor)] = tensor, here
            if not tensor.stop_gradient and tensor.dtype in _FLOATS:
                tensor.register_hook(partial(self.store, here._replace(phase="gradient")))

    def next_mask_key(self, path: str) -> TensorKey:
        """Returns the key of the mask of a layer's next dropout, and counts the dropout."""
        layer_mask = (f"{path} mask", self.micro_batch)
        call = self._calls[layer_mask]
        self._calls[layer_mask] += 1
        return TensorKey(self.step, "forward", path, self.micro_batch, "mask", call)

    def store_parameters(self, phase: str) -> None:
        """Stores parameters: all in phase "update", else those changed since the last call."""
        for name, parameter in self.parameters().items():
            array = numbers_of(parameter.detach())
            last = self._last.get(name)
            if phase == "update" and name.rpartition(".")[2] in _STATISTICS:
                self.store(TensorKey(self.step, "buffer", name, role="buffer"), array)
            elif phase == "update" or last is None or last.tobytes() != array.tobytes():
                self.store(TensorKey(self.step, phase, name, role="parameter"), array)
            self._last[name] = array

    def store_gradients(self, phase: str) -> None:
        """Stores the present gradients of parameters as those of a phase."""
        for name, parameter in self.parameters().items():
            if parameter.grad is not None:
                self.store(TensorKey(self.step, phase, name, role="gradient"), parameter.grad)
        self.stored_phases.add(phase)

    def forget_gradients(self) -> None:
        """Drops the parameters' gradients of phase "gradient" from this step."""
        for key in self.recorded.in_phase(self.step, "gradient"):
            if key.role == "gradient":
                del self.recorded.tensors[key]

    def store_gradients_left(self) -> None:
        """Stores gradients of the step before that are not cleared when backward begins."""
        for name, parameter in self.parameters().items():
            if parameter.grad is not None and bool((parameter.grad != 0).any()):
                self.store(TensorKey(self.step, "gradient", name, role=record.LEFT), parameter.grad)

    def store_state(self) -> None:
        """Stores parameters and buffers after the optimizer's step."""
        self.store_parameters("update")
        for prefix, root in self._roots:
            buffers = root.named_buffers()
            if isinstance(root, PipelineLayer):
                trained, local = root.state.own_parameters(), root.state.local_tensors()
                buffers = [(name, t) for name, t in local.items() if name not in trained]
            for name, tensor in buffers:
                self.store(TensorKey(self.step, "buffer", prefix + name, role="buffer"), tensor)

    def end_step(self) -> None:
        """Writes the step into its file.

        Raises:
            Finished: It was the last wanted step.
        """
        job = current_job()
        all_degrees = {} if job is None else job.degrees.__dict__
        degrees = {axis: all_degrees[axis] for axis in AXES if all_degrees.get(axis, 1) > 1}
        if job is not None and not job.local:
            self.recorded.coordinate = {
                axis: getattr(job.coordinate, axis) for axis in AXES if axis in degrees
            }
        elif job is None and paddle.distributed.get_world_size() > 1:
            # Replicas without fleet.init.
            degrees = {"dp": paddle.distributed.get_world_size()}
            self.recorded.coordinate = {"dp": self.recorded.rank}
        record.write(self._folder, self.recorded, degrees, self.step)
        self._calls.clear()
        self.stored_phases.clear()
        self.made.clear()
        self.step += 1
        self.micro_batch = -1
        if self.step >= self._steps:
            raise Finished(0)

"""Names the tensors of a process by their meaning, and stores them until the step is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.compare.differences import numbers_of
from fleetpipe.contrib.experts import Experts
from fleetpipe.contrib.locator import record
from fleetpipe.contrib.locator.record import Meaning
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
    """The wanted number of steps is recorded, so that the script can stop."""


class Recorder:
    """Collects the tensors of one process.

    Attributes:
        step: The present training step, from 0.
        micro_batch: The micro-batch of the present forward, within the step and replica.
        in_pipeline: Whether ``train_batch`` runs; the engine then tells the micro-batch.
        forwarding: Whether ``train_batch`` runs the forward of a micro-batch.
        recorded: The tensors of this step.
    """

    def __init__(self, folder: Path, steps: int, rank: int) -> None:
        """Creates a recorder that writes into a folder."""
        self._folder = folder
        self._steps = steps
        self.recorded = record.RankTensors(rank, {})
        self.step = 0
        self.micro_batch = -1
        self.in_pipeline = False
        self.forwarding = False
        self._roots: list[tuple[str, Layer]] = []
        self._paths: dict[int, str] = {}
        self._parameter_names: dict[int, str] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        #: The outputs of layers in this step by id; held, so that no other tensor gets the id.
        self.made: dict[int, tuple[Tensor, Meaning]] = {}
        self._last: dict[str, np.ndarray] = {}
        #: The phases of which gradients are stored in this step.
        self.noted: set[str] = set()

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
            held = (
                root.state.own_parameters()
                if isinstance(root, PipelineLayer)
                else dict(root.named_parameters())
            )
            for name, parameter in held.items():
                named.setdefault(id(parameter), (prefix + name, parameter))
        return dict(named.values())

    def name_of(self, parameter: Tensor) -> str | None:
        """Returns the name of a parameter."""
        return self._parameter_names.get(id(parameter))

    # Tensors

    def put(self, place: Meaning, tensor: Tensor | np.ndarray) -> None:
        """Stores a copy of a tensor."""
        array = tensor if isinstance(tensor, np.ndarray) else numbers_of(tensor.detach())
        self.recorded.tensors[place] = array

    def called(self, layer: Layer, inputs: Iterable[Nest], output: Nest) -> None:
        """Stores the outputs of a layer, and the inputs that are no output of another layer."""
        path = self.path_of(layer)
        if path is None:
            return
        key = (path, self.micro_batch)
        call = self._calls[key]
        self._calls[key] += 1

        def place(part: str) -> Meaning:
            return Meaning(self.step, "forward", path, self.micro_batch, part, call)

        sources = []
        # A single number is a loss, whose rows depend on the micro-batch, and is left out; one
        # beside other outputs is compared where a micro-batch has the twin's rows.
        for number, tensor in enumerate(tensors_of(list(inputs))):
            source = self.made.get(id(tensor))
            if source is not None:
                sources.append(source[1])
            elif tensor.dtype in _FLOATS and math.prod(tensor.shape) > 1:
                self.put(place(f"input {number}"), tensor)
        outputs = list(tensors_of(output))
        for number, tensor in enumerate(outputs):
            if id(tensor) in self.made and self.made[id(tensor)][1].name == path:
                continue
            if math.prod(tensor.shape) == 1 and len(outputs) == 1:
                continue
            here = place(f"output {number}")
            self.put(here, tensor)
            self.recorded.sources[here] = sources
            if id(tensor) in self.made:
                # The output of another layer too: its gradient is also that of its earlier uses.
                continue
            self.made[id(tensor)] = tensor, here
            if not tensor.stop_gradient and tensor.dtype in _FLOATS:
                tensor.register_hook(partial(self.put, here._replace(phase="gradient")))

    def next_mask(self, path: str) -> Meaning:
        """Returns the place of the mask of a layer's next dropout."""
        key = (f"{path} mask", self.micro_batch)
        self._calls[key] += 1
        return Meaning(self.step, "forward", path, self.micro_batch, "mask", self._calls[key] - 1)

    def parameters_as(self, phase: str) -> None:
        """Stores the parameters: in phase "update" all, else those that have changed since."""
        for name, parameter in self.parameters().items():
            array = numbers_of(parameter.detach())
            last = self._last.get(name)
            if phase == "update" and name.rpartition(".")[2] in _STATISTICS:
                self.put(Meaning(self.step, "buffer", name, part="buffer"), array)
            elif phase == "update" or last is None or last.tobytes() != array.tobytes():
                self.put(Meaning(self.step, phase, name, part="parameter"), array)
            self._last[name] = array

    def gradients_as(self, phase: str) -> None:
        """Stores the present gradients of parameters."""
        for name, parameter in self.parameters().items():
            if parameter.grad is not None:
                self.put(Meaning(self.step, phase, name, part="gradient"), parameter.grad)
        self.noted.add(phase)

    def forget_gradients(self) -> None:
        """Drops the parameters' gradients of phase "gradient" from this step."""
        for place in self.recorded.of(self.step, "gradient"):
            if place.part == "gradient":
                del self.recorded.tensors[place]

    def note_gradients_left(self) -> None:
        """Stores gradients of the step before that still exist when backward begins."""
        for name, parameter in self.parameters().items():
            if parameter.grad is not None and bool((parameter.grad != 0).any()):
                self.put(Meaning(self.step, "gradient", name, part=record.LEFT), parameter.grad)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of all models."""
        for prefix, root in self._roots:
            if isinstance(root, PipelineLayer):
                trained = root.state.own_parameters()
                named = [(n, t) for n, t in root.state.local_tensors().items() if n not in trained]
            else:
                named = list(root.named_buffers())
            yield from ((prefix + name, tensor) for name, tensor in named)

    def stepped(self) -> None:
        """Stores parameters and buffers after the optimizer's step."""
        self.parameters_as("update")
        for name, tensor in self.buffers():
            self.put(Meaning(self.step, "buffer", name, part="buffer"), tensor)

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
        self.noted.clear()
        self.made.clear()
        self.step += 1
        self.micro_batch = -1
        if self.step >= self._steps:
            raise Finished(0)

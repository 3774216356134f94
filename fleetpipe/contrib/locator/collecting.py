"""Puts a recorder's hooks on layers, losses, backward, clips and optimizers of a script.

``run`` runs a script so; ``collecting`` installs the hooks, whose methods are in ``_Hooks``.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe import numerics
from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.capture import api
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.compare.differences import numbers_of
from fleetpipe.contrib.guards import Guards
from fleetpipe.contrib.locator.locate_options import SETTING, Setting
from fleetpipe.contrib.locator.record import DROPPED, READ_ON, Meaning
from fleetpipe.contrib.locator.recorder import Recorder
from fleetpipe.contrib.locator.twin import Feed, degrees_of_one
from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.batch.micro_batches import ObservedBatch
from fleetpipe.dygraph.nest import tensors_by_place, tensors_of
from fleetpipe.dygraph.train.observers import observing_all
from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played
from fleetpipe.errors import UsageError
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.layer import wrapped_layer
from fleetpipe.paddle_api.optimizer import base_optimizer, optimized_parameters
from fleetpipe.schedules import Action, Op

#: A replacement of a method: it takes the method first, then the method's own arguments.
Around = Callable[..., Any]


def run(options: argparse.Namespace) -> int:
    """Runs a script and records its steps as the environment asks.

    Returns:
        The script's own exit code; 0 once the wanted number of steps is recorded.
    """
    numerics.repeat_bits()
    setting = Setting(**json.loads(os.environ[SETTING]))
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    recorder = Recorder(Path(setting.folder), setting.steps, rank)
    feed = Feed(Path(setting.job), setting.perturbed) if setting.job else None
    with ExitStack() as stack:
        stack.enter_context(in_place_of_paddles())
        if feed is not None and setting.automatic:
            stack.enter_context(degrees_of_one(feed.replicas))
        stack.enter_context(collecting(recorder, feed))
        return script.execute_to_the_end(options.script, options.arguments)


@contextmanager
def collecting(recorder: Recorder, feed: Feed | None = None) -> Iterator[None]:
    """While this context is open, all training in this process is recorded.

    Args:
        recorder: Receives the tensors.
        feed: For a twin: gives each step the job's weights, data and gradients.
    """
    hooks = _Hooks(recorder, feed)
    with ExitStack() as stack:
        stack.enter_context(observing_all(lambda _: hooks))

        def put(owner: Any, name: str, around: Around) -> None:
            method = owner.__dict__[name]

            @functools.wraps(method)
            def call(*arguments: Any, **named: Any) -> Any:
                return around(method, *arguments, **named)

            stack.enter_context(replaced((owner, name, call)))

        put(api, "pipeline", hooks.capture)
        put(Capturing, "with_numbers", hooks.unrecorded)
        put(paddle.nn.Layer, "__call__", hooks.layer)
        for module in (paddle.nn.functional, paddle.nn.functional.common):
            # dropout2d calls the one of the second module.
            put(module, "dropout", hooks.dropout)
        put(paddle.distributed.fleet.recompute, "recompute", hooks.recompute)
        put(paddle.Tensor, "backward", hooks.backward)
        put(PipelineParallel, "train_batch", hooks.train_batch)
        put(PipelineParallel, "forward_backward_pipeline", hooks.forward_backward)
        if feed is not None:
            # A twin steps by the job's gradients, whose norm is not the one that guards measure.
            put(Guards, "begin", lambda *_: None)
            put(PipelineLayer, "__init__", hooks.without_recompute)
        clips: Any = paddle.nn.ClipGradByNorm.__base__
        for kind in _with_method(clips, "__call__"):
            put(kind, "__call__", hooks.clip)
        for kind in (PipelineOptimizer, *_with_method(paddle.optimizer.Optimizer, "step")):
            put(kind, "step", hooks.optimizer_step)
        for kind in _with_method(paddle.optimizer.Optimizer, "clear_grad"):
            put(kind, "clear_grad", hooks.clear_grad)
        yield


def _with_method(base: type, name: str) -> list[type]:
    """Returns a class and its subclasses that define a method themselves."""
    kinds = {base} if name in base.__dict__ else set()
    derived: list[type] = base.__subclasses__()
    return [*kinds.union(*(_with_method(kind, name) for kind in derived))]


def _mask_of(call: Around, x: Tensor, *more: Any, **named: Any) -> np.ndarray:
    """Returns the mask of a dropout before it runs: its output does not show it where x is 0."""
    states = paddle.get_rng_state()
    with paddle.no_grad():
        kept: np.ndarray = numbers_of(call(paddle.ones_like(x), *more, **named) != 0)
    paddle.set_rng_state(states)
    return kept


class _Hooks(BatchObserver):
    """The replacements of methods, which call a method and record its tensors."""

    def __init__(self, recorder: Recorder, feed: Feed | None) -> None:
        self._recorder = recorder
        self._feed = feed
        self._paths: list[str | None] = []
        self._training = False
        #: By optimizer how often its step was skipped, so that the twin reads more samples first.
        self._put_off: Counter[int] = Counter()
        self._paused = False
        self._in_recompute = False
        self._steps_within = 0
        self._clips_within = 0
        #: In a user's own loop: the micro-batches of earlier forward-backward calls in this step.
        self._earlier = 0

    # Layers

    def unrecorded(self, call: Around, *arguments: Any, **named: Any) -> Any:
        """Calls a function without recording its layers, such as a capture."""
        before, self._paused = self._paused, True
        try:
            return call(*arguments, **named)
        finally:
            self._paused = before

    def capture(self, call: Around, model: Layer, *arguments: Any, **named: Any) -> Any:
        """Captures a model without comparing it to the plain one; for a twin into one stage."""
        passed = inspect.signature(call).bind(model, *arguments, **named).arguments
        passed["verify"] = False
        if self._feed is not None:
            for name in ("split_spec", "num_stages", "num_chunks", "recompute_interval"):
                passed.pop(name, None)
        return self.unrecorded(call, **passed)

    def without_recompute(self, call: Around, *arguments: Any, **named: Any) -> None:
        """Builds a pipeline without recompute, which would not get the job's dropout masks."""
        call(*arguments, **{**named, "recompute_interval": 0})

    def layer(self, call: Around, layer: Layer, *inputs: Any, **named: Any) -> Any:
        """Calls a layer and records its inputs and outputs."""
        recorder = self._recorder
        outermost = not self._paths
        training = paddle.is_grad_enabled() or self._in_recompute
        wanted = recorder.forwarding if recorder.in_pipeline else training
        if self._paused or not wanted or isinstance(layer, PipelineParallel):
            return call(layer, *inputs, **named)
        if outermost:
            # The mode of the outermost layer counts: a layer within may be frozen.
            self._training = recorder.in_pipeline or layer.training
            self._enter_root(layer, [*inputs, *named.values()])
        self._paths.append(recorder.path_of(layer) if self._training else None)
        try:
            output = call(layer, *inputs, **named)
        finally:
            self._paths.pop()
        if self._training:
            recorder.called(layer, [*inputs, *named.values()], output)
        return output

    def dropout(self, call: Around, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """Applies a dropout: records the mask of a job, and gives a twin the job's mask."""
        bound = inspect.signature(call).bind(x, *more, **named)
        bound.apply_defaults()
        p, training, mode = (bound.arguments[name] for name in ("p", "training", "mode"))
        path = self._paths[-1] if self._paths else None
        if path is None or not training or not isinstance(p, (int, float)) or not 0 < p < 1:
            return call(x, *more, **named)
        place = self._recorder.next_mask(path)
        if self._feed is None:
            dropped = numbers_of(x.detach().reshape([-1])[:32])
            self._recorder.put(place._replace(part=DROPPED), dropped)
            self._recorder.put(place, _mask_of(call, x, *more, **named))
            return call(x, *more, **named)
        output = call(x, *more, **named)
        mask = self._feed.whole.mask(place, tuple(output.shape), self._recorder.recorded)
        if mask is None:
            return output
        kept = x * paddle.to_tensor(mask).astype(x.dtype)
        return kept / (1 - p) if mode == "upscale_in_train" else kept

    def recompute(self, call: Around, function: Any, *inputs: Any, **named: Any) -> Any:
        """Runs a function with recompute; in a twin without it."""
        if self._feed is not None:
            options = ("preserve_rng_state", "use_reentrant", "offload_indices")
            return function(*inputs, **{k: v for k, v in named.items() if k not in options})
        before, self._in_recompute = self._in_recompute, paddle.is_grad_enabled()
        try:
            return call(function, *inputs, **named)
        finally:
            self._in_recompute = before

    def _enter_root(self, layer: Layer, inputs: list[Nest]) -> None:
        """Begins the call of an outermost layer: a model, whose inputs are samples, or a loss."""
        recorder = self._recorder
        inner = wrapped_layer(layer) or layer
        new = recorder.path_of(inner) is None and recorder.add_root(layer)
        if new and recorder.step == 0 and any(True for _ in inner.parameters()):
            self._begin_step()
        if recorder.in_pipeline or not layer.training:
            return
        if inner is recorder.main_root:
            if recorder.micro_batch < 0 and recorder.step:
                self._begin_step()
            recorder.micro_batch += 1
            self._data("input", inputs, recorder.micro_batch)
        elif recorder.main_root is not None and not any(True for _ in inner.parameters()):
            integers = [t for t in tensors_of(inputs) if not t.is_floating_point()]
            self._data("label", integers, recorder.micro_batch)

    def _begin_step(self) -> None:
        self._recorder.parameters_as("initial")
        if self._feed is not None:
            self._feed.parameters(self._recorder.step, self._recorder.parameters())

    def _data(self, kind: str, values: Nest, micro_batch: int) -> None:
        recorder = self._recorder
        for path, tensor in tensors_by_place(values).items():
            recorder.put(Meaning(recorder.step, "data", "", micro_batch, kind + path), tensor)

    # A pipeline's batch

    def train_batch(
        self, call: Around, pipeline: PipelineParallel, data: Any, *more: Any, **named: Any
    ) -> Any:
        """Runs ``train_batch`` as one step, and records the loss that it returns."""
        recorder = self._recorder
        loss = self.forward_backward(call, pipeline, data, *more, **named)
        for number, value in enumerate(loss if isinstance(loss, list) else [loss]):
            recorder.put(Meaning(recorder.step, "loss", "", part=f"returned {number}"), value)
        recorder.end_step()
        return loss

    def forward_backward(
        self, call: Around, pipeline: PipelineParallel, data: Any, *more: Any, **named: Any
    ) -> Any:
        """Runs forward and backward of some micro-batches: all of a step, or a part of them."""
        recorder = self._recorder
        if pipeline.layers.placement.has_head:
            raise UsageError(
                "locate compares no vocabulary head in parts",
                cause="each rank's part is a stage of its own, which one device has not",
                fix="locate with an nn.Linear in its place",
            )
        recorder.add_root(pipeline.layers)
        self._pipeline = pipeline
        self._earlier = recorder.micro_batch + 1
        if not self._earlier:
            self._begin_step()
        if self._feed is not None:
            data = self._feed.batch(recorder.step, data, pipeline)
        recorder.in_pipeline = True
        try:
            return call(pipeline, data, *more, **named)
        finally:
            recorder.in_pipeline = False

    def begin(self, batch: ObservedBatch) -> None:
        """Records the samples that this rank is given."""
        self._loss_fn_idx = batch.loss_fn_idx
        for number, value in enumerate(batch.data.inputs or (), self._earlier):
            self._data("input", value, number)
        owns_loss = self._pipeline.is_pipeline_last_stage(ignore_virtual=True)
        for number, value in enumerate(batch.data.labels or () if owns_loss else (), self._earlier):
            self._data("label", value, number)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Tells the recorder the micro-batch whose forward runs."""
        if not isinstance(op, Action) or op.kind != "F":
            return instruction
        recorder = self._recorder

        def forward() -> Blocked | None:
            recorder.forwarding = recorder.in_pipeline
            recorder.micro_batch = op.micro_batch + self._earlier
            try:
                return instruction()
            finally:
                recorder.forwarding = False

        return forward

    def computed(self) -> None:
        """Records the losses, and the gradients of this rank's micro-batches."""
        recorder, losses = self._recorder, self._pipeline.total_loss
        for number, share in enumerate(losses[self._loss_fn_idx] if losses else (), self._earlier):
            recorder.put(Meaning(recorder.step, "loss", "", number, "share"), share)
        if self._earlier:
            # Several calls accumulate gradients; those after one call are no step's.
            recorder.forget_gradients()
        else:
            recorder.gradients_as("gradient")

    # Backward and the step

    def backward(self, call: Around, tensor: Tensor, *more: Any, **named: Any) -> None:
        """Runs backward in a user's own loop, and records the loss and the gradients."""
        recorder = self._recorder
        if recorder.main_root is None or recorder.in_pipeline or self._paused:
            call(tensor, *more, **named)
            return
        recorder.put(Meaning(recorder.step, "loss", "", recorder.micro_batch, "share"), tensor)
        if "gradient" not in recorder.noted:
            recorder.note_gradients_left()
        self.unrecorded(call, tensor, *more, **named)
        recorder.made.clear()
        recorder.gradients_as("gradient")

    def clip(self, call: Around, clip: Any, pairs: Any, *more: Any, **named: Any) -> Any:
        """Clips gradients and records them; a clip may call another one."""
        self._clips_within += 1
        try:
            clipped = call(clip, pairs, *more, **named)
        finally:
            self._clips_within -= 1
        recorder = self._recorder
        for parameter, gradient in clipped if self._clips_within == 0 and clipped else ():
            name = recorder.name_of(parameter)
            if name is not None and gradient is not None:
                recorder.put(Meaning(recorder.step, "clip", name, part="gradient"), gradient)
        return clipped

    def optimizer_step(self, call: Around, optimizer: Optimizer, *more: Any, **named: Any) -> Any:
        """Steps an optimizer, and records its inputs and the new parameters.

        A twin with fewer samples than all replicas of the job together does not step yet: its
        script goes on, and the next samples count for this step too.
        """
        recorder, feed = self._recorder, self._feed
        if recorder.main_root is None:
            return call(optimizer, *more, **named)
        alone = self._steps_within == 0 and not recorder.in_pipeline
        if alone and feed is not None and feed.must_read_on(recorder.recorded, recorder.step):
            self._put_off[id(base_optimizer(optimizer))] += 1
            return None
        if self._steps_within == 0 and "gradient" not in recorder.noted:
            recorder.gradients_as("gradient")
        if isinstance(optimizer, paddle.optimizer.Optimizer):
            self._inputs_of(optimizer)
        self._steps_within += 1
        try:
            result = call(optimizer, *more, **named)
        finally:
            self._steps_within -= 1
        if self._steps_within == 0:
            self._put_off.pop(id(base_optimizer(optimizer)), None)
            recorder.stepped()
            if not recorder.in_pipeline:
                recorder.end_step()
        return result

    def clear_grad(self, call: Around, optimizer: Optimizer, *more: Any, **named: Any) -> None:
        """Clears gradients, unless the step was skipped and they still accumulate."""
        if not self._put_off[id(base_optimizer(optimizer))]:
            call(optimizer, *more, **named)

    def _inputs_of(self, optimizer: Optimizer) -> None:
        """Records gradients, learning rate and parameter names; sets a twin's to the job's."""
        recorder = self._recorder
        put_off = self._put_off[id(base_optimizer(optimizer))]
        if put_off and self._feed is not None:
            recorder.put(Meaning(recorder.step, "data", "", part=READ_ON), np.array(put_off))
            self._feed.average(put_off + 1, optimized_parameters(optimizer))
            self._feed.rate(recorder.step, optimizer)
        recorder.gradients_as("reduction")
        if self._feed is not None:
            self._feed.gradients(recorder.step, recorder.parameters())
        rate = np.asarray(optimizer.get_lr(), "float64")
        place = Meaning(recorder.step, "optimizer input", "", part="learning rate")
        recorder.put(place, rate)
        names = [recorder.name_of(p) for p in optimized_parameters(optimizer)]
        names += recorder.recorded.listed(place)
        listed = json.dumps(sorted({name for name in names if name is not None}))
        text = np.frombuffer(listed.encode(), "uint8")
        recorder.put(place._replace(part="parameters"), text)

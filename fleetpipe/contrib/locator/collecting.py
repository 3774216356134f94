"""Records the tensors of a script's layers, losses, backward, clips and optimizers.

``run`` runs a script and records it; ``collecting`` replaces Paddle's and fleetpipe's functions by
methods of ``_Hooks``, which call the function and give its tensors to a recorder. A run is a job,
on its ranks, or a job's twin: the same script on one device, to which ``Feed`` gives the job's
values.
"""

from __future__ import annotations

import argparse
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
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.compare.differences import numbers_of
from fleetpipe.compare.trail import wrapping
from fleetpipe.contrib.guards import Guards
from fleetpipe.contrib.locator.locate_options import SETTING, Setting
from fleetpipe.contrib.locator.record import DROPPED, READ_ON, TensorKey
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
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import wrapped_layer
from fleetpipe.paddle_api.optimizer import base_optimizer, optimized_parameters
from fleetpipe.schedules import Action, Op

#: A wrapper of a function: it takes the function first, then the arguments of the call.
Wrapper = Callable[..., Any]


def run(options: argparse.Namespace) -> int:
    """Runs a script and records its steps, with the settings in the environment.

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
        feed: For a one-device twin: gives each step the job's weights, data and gradients.
    """
    hooks = _Hooks(recorder, feed)
    clip: Any = paddle.nn.ClipGradByNorm.__base__
    optimizer = paddle.optimizer.Optimizer
    rows: list[tuple[Any, str, Wrapper]] = [
        (api, "pipeline", hooks.capture_model),
        (Capturer, "capture_inputs", hooks.call_unrecorded),
        (paddle.nn.Layer, "__call__", hooks.call_layer),
        (paddle.nn.functional, "dropout", hooks.apply_dropout),
        (paddle.nn.functional.common, "dropout", hooks.apply_dropout),  # dropout2d calls this one
        (paddle.distributed.fleet.recompute, "recompute", hooks.run_recompute),
        (paddle.Tensor, "backward", hooks.backward),
        (PipelineParallel, "train_batch", hooks.train_batch),
        (PipelineParallel, "forward_backward_pipeline", hooks.forward_backward),
        (PipelineOptimizer, "step", hooks.optimizer_step),
        *((kind, "__call__", hooks.clip_gradients) for kind in _classes_defining(clip, "__call__")),
        *((kind, "step", hooks.optimizer_step) for kind in _classes_defining(optimizer, "step")),
        *(
            (kind, "clear_grad", hooks.clear_grad)
            for kind in _classes_defining(optimizer, "clear_grad")
        ),
    ]
    if feed is not None:
        # A twin steps by the job's gradients, whose norm is not the one that guards measure.
        rows.append((Guards, "begin", lambda *_: None))
        rows.append((PipelineLayer, "__init__", hooks.build_without_recompute))
    with observing_all(lambda _: hooks), wrapping(*rows):
        yield


def _classes_defining(base: type, name: str) -> list[type]:
    """Returns the class and its subclasses, as far as they define the method themselves."""
    kinds = {base} if name in base.__dict__ else set()
    derived: list[type] = base.__subclasses__()
    return [*kinds.union(*(_classes_defining(kind, name) for kind in derived))]


def _draw_mask(original: Wrapper, x: Tensor, *more: Any, **named: Any) -> np.ndarray:
    """Returns the mask that a dropout will draw next, and restores the random state.

    The dropout gets ones, since its output does not show the mask where ``x`` is 0.
    """
    states = paddle.get_rng_state()
    with paddle.no_grad():
        mask: np.ndarray = numbers_of(original(paddle.ones_like(x), *more, **named) != 0)
    paddle.set_rng_state(states)
    return mask


class _Hooks(BatchObserver):
    """Wrappers of functions and methods, which call the original and record its tensors.

    A wrapper takes the original function first, then the arguments of the call. "Twin" below is a
    run on one device, to which ``Feed`` gives the values of a job.
    """

    def __init__(self, recorder: Recorder, feed: Feed | None) -> None:
        self._recorder = recorder
        self._feed = feed
        #: The paths of the layers that run now, from the outermost; None for one without a record.
        self._paths: list[str | None] = []
        #: Whether the outermost layer is in training.
        self._training = False
        #: By the id of an optimizer, how often a twin has put its step off, to read more samples.
        self._put_off: Counter[int] = Counter()
        #: Whether no layer is recorded now.
        self._paused = False
        #: Whether a function runs with recompute, which trains although gradients are disabled.
        self._in_recompute = False
        #: How many calls of optimizers' ``step``, and of clips, run now, one within another.
        self._steps_within = 0
        self._clips_within = 0
        #: In a user's own loop: the micro-batches of earlier forward-backward calls in this step.
        self._earlier = 0

    # Layers

    def call_unrecorded(self, original: Wrapper, *arguments: Any, **named: Any) -> Any:
        """Calls a function without recording its layers, such as a capture."""
        before, self._paused = self._paused, True
        try:
            return original(*arguments, **named)
        finally:
            self._paused = before

    def capture_model(self, original: Wrapper, model: Layer, *arguments: Any, **named: Any) -> Any:
        """Captures a model without the check of the captured model; in a twin as one stage."""
        passed = inspect.signature(original).bind(model, *arguments, **named).arguments
        passed["verify"] = False
        if self._feed is not None:
            for name in ("split_spec", "num_stages", "num_chunks", "recompute_interval"):
                passed.pop(name, None)
        return self.call_unrecorded(original, **passed)

    def build_without_recompute(self, original: Wrapper, *arguments: Any, **named: Any) -> None:
        """Builds a pipeline without recompute, which would draw other masks than the job's."""
        original(*arguments, **{**named, "recompute_interval": 0})

    def call_layer(self, original: Wrapper, layer: Layer, *inputs: Any, **named: Any) -> Any:
        """Calls a layer, and records its inputs and outputs if it trains."""
        recorder = self._recorder
        outermost = not self._paths
        training = paddle.is_grad_enabled() or self._in_recompute
        wanted = recorder.forwarding if recorder.in_pipeline else training
        if self._paused or not wanted or isinstance(layer, PipelineParallel):
            return original(layer, *inputs, **named)
        if outermost:
            # The mode of the outermost layer counts: a layer within may be frozen.
            self._training = recorder.in_pipeline or layer.training
            self._enter_outermost_layer(layer, [*inputs, *named.values()])
        self._paths.append(recorder.path_of(layer) if self._training else None)
        try:
            output = original(layer, *inputs, **named)
        finally:
            self._paths.pop()
        if self._training:
            recorder.record_call(layer, [*inputs, *named.values()], output)
        return output

    def apply_dropout(self, original: Wrapper, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """Applies a dropout; records its mask in a job, and takes the job's mask in a twin."""
        bound = inspect.signature(original).bind(x, *more, **named)
        bound.apply_defaults()
        p, training, mode = (bound.arguments[name] for name in ("p", "training", "mode"))
        path = self._paths[-1] if self._paths else None
        if path is None or not training or not isinstance(p, (int, float)) or not 0 < p < 1:
            return original(x, *more, **named)
        key = self._recorder.next_mask_key(path)
        if self._feed is None:
            # Some of the numbers that it is applied to: they show whether two ranks drop the same.
            dropped = numbers_of(x.detach().reshape([-1])[:32])
            self._recorder.store(key._replace(role=DROPPED), dropped)
            self._recorder.store(key, _draw_mask(original, x, *more, **named))
            return original(x, *more, **named)
        output = original(x, *more, **named)
        mask = self._feed.full_tensors.mask(key, tuple(output.shape), self._recorder.recorded)
        if mask is None:
            return output
        masked = x * paddle.to_tensor(mask).astype(x.dtype)
        return masked / (1 - p) if mode == "upscale_in_train" else masked

    def run_recompute(self, original: Wrapper, function: Any, *inputs: Any, **named: Any) -> Any:
        """Runs a function with recompute; in a one-device twin without it."""
        if self._feed is not None:
            options = ("preserve_rng_state", "use_reentrant", "offload_indices")
            return function(*inputs, **{k: v for k, v in named.items() if k not in options})
        before, self._in_recompute = self._in_recompute, paddle.is_grad_enabled()
        try:
            return original(function, *inputs, **named)
        finally:
            self._in_recompute = before

    def _enter_outermost_layer(self, layer: Layer, inputs: list[Nest]) -> None:
        """Records the inputs of an outermost layer: samples of a model, labels of a loss."""
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
            self._record_samples("input", inputs, recorder.micro_batch)
        elif recorder.main_root is not None and not any(True for _ in inner.parameters()):
            integers = [t for t in tensors_of(inputs) if not t.is_floating_point()]
            self._record_samples("label", integers, recorder.micro_batch)

    def _begin_step(self) -> None:
        """Records the parameters at the begin of a step, and gives a twin those of the job."""
        self._recorder.store_parameters("initial")
        if self._feed is not None:
            self._feed.set_parameters(self._recorder.step, self._recorder.parameters())

    def _record_samples(self, kind: str, values: Nest, micro_batch: int) -> None:
        """Records the inputs (``kind`` "input") or the labels ("label") of a micro-batch."""
        recorder = self._recorder
        for path, tensor in tensors_by_place(values).items():
            recorder.store(TensorKey(recorder.step, "data", "", micro_batch, kind + path), tensor)

    # A pipeline's batch

    def train_batch(
        self, original: Wrapper, pipeline: PipelineParallel, data: Any, *more: Any, **named: Any
    ) -> Any:
        """Runs ``train_batch`` as one step, and records the loss that it returns."""
        recorder = self._recorder
        loss = self.forward_backward(original, pipeline, data, *more, **named)
        for number, value in enumerate(loss if isinstance(loss, list) else [loss]):
            recorder.store(TensorKey(recorder.step, "loss", "", role=f"returned {number}"), value)
        recorder.end_step()
        return loss

    def forward_backward(
        self, original: Wrapper, pipeline: PipelineParallel, data: Any, *more: Any, **named: Any
    ) -> Any:
        """Runs forward and backward of the micro-batches of a step, or of some of them."""
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
            data = self._feed.batch_of_all_replicas(recorder.step, data, pipeline)
        recorder.in_pipeline = True
        try:
            return original(pipeline, data, *more, **named)
        finally:
            recorder.in_pipeline = False

    def begin(self, batch: ObservedBatch) -> None:
        """Records the samples that this rank is given."""
        self._loss_fn_idx = batch.loss_fn_idx
        for number, value in enumerate(batch.data.inputs or (), self._earlier):
            self._record_samples("input", value, number)
        owns_loss = self._pipeline.is_pipeline_last_stage(ignore_virtual=True)
        for number, value in enumerate(batch.data.labels or () if owns_loss else (), self._earlier):
            self._record_samples("label", value, number)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Tells the recorder the micro-batch whose forward runs."""
        if not isinstance(op, Action) or op.kind != "F":
            return instruction
        recorder = self._recorder

        def run_forward() -> Blocked | None:
            recorder.forwarding = recorder.in_pipeline
            recorder.micro_batch = op.micro_batch + self._earlier
            try:
                return instruction()
            finally:
                recorder.forwarding = False

        return run_forward

    def computed(self) -> None:
        """Records the losses and parameters' gradients of a batch, before ranks add them up."""
        # For each loss function, the losses of the micro-batches; None on ranks without a loss.
        recorder, losses = self._recorder, self._pipeline.total_loss
        for number, share in enumerate(losses[self._loss_fn_idx] if losses else (), self._earlier):
            recorder.store(TensorKey(recorder.step, "loss", "", number, "share"), share)
        if self._earlier:
            # Several calls accumulate gradients; those after one call are no step's.
            recorder.forget_gradients()
        else:
            recorder.store_gradients("gradient")

    # Backward and the step

    def backward(self, original: Wrapper, tensor: Tensor, *more: Any, **named: Any) -> None:
        """Runs backward in a user's own loop, and records the loss and the gradients."""
        recorder = self._recorder
        if recorder.main_root is None or recorder.in_pipeline or self._paused:
            original(tensor, *more, **named)
            return
        recorder.store(TensorKey(recorder.step, "loss", "", recorder.micro_batch, "share"), tensor)
        if "gradient" not in recorder.stored_phases:
            recorder.store_gradients_left()
        self.call_unrecorded(original, tensor, *more, **named)
        recorder.made.clear()
        recorder.store_gradients("gradient")

    def clip_gradients(
        self, original: Wrapper, clip: Any, pairs: Any, *more: Any, **named: Any
    ) -> Any:
        """Clips gradients and records them, once if a clip calls another clip."""
        self._clips_within += 1
        try:
            clipped = original(clip, pairs, *more, **named)
        finally:
            self._clips_within -= 1
        recorder = self._recorder
        for parameter, gradient in clipped if self._clips_within == 0 and clipped else ():
            name = recorder.name_of(parameter)
            if name is not None and gradient is not None:
                recorder.store(TensorKey(recorder.step, "clip", name, role="gradient"), gradient)
        return clipped

    def optimizer_step(
        self, original: Wrapper, optimizer: Optimizer, *more: Any, **named: Any
    ) -> Any:
        """Steps an optimizer, and records its inputs and the new parameters.

        A wrapper of an optimizer calls the ``step`` of the optimizer within its own: the outermost
        call counts as the step.

        A one-device twin with fewer samples than all replicas of the job together does not step
        yet: its script goes on, and the next samples count for this step too.

        Returns:
            What ``step`` returns; None if the twin does not step yet.
        """
        recorder, feed = self._recorder, self._feed
        if recorder.main_root is None:
            return original(optimizer, *more, **named)
        in_loop = self._steps_within == 0 and not recorder.in_pipeline  # a user's own loop
        if in_loop and feed is not None and feed.lacks_samples(recorder.recorded, recorder.step):
            self._put_off[id(base_optimizer(optimizer))] += 1
            return None
        if self._steps_within == 0 and "gradient" not in recorder.stored_phases:
            recorder.store_gradients("gradient")
        if isinstance(optimizer, paddle.optimizer.Optimizer):
            self._record_optimizer_inputs(optimizer)
        self._steps_within += 1
        try:
            result = original(optimizer, *more, **named)
        finally:
            self._steps_within -= 1
        if self._steps_within == 0:
            self._put_off.pop(id(base_optimizer(optimizer)), None)
            recorder.store_state()
            if not recorder.in_pipeline:
                recorder.end_step()
        return result

    def clear_grad(self, original: Wrapper, optimizer: Optimizer, *more: Any, **named: Any) -> None:
        """Clears gradients, unless a twin put its step off: then they still accumulate."""
        if not self._put_off[id(base_optimizer(optimizer))]:
            original(optimizer, *more, **named)

    def _record_optimizer_inputs(self, optimizer: Optimizer) -> None:
        """Records gradients, learning rate and parameter names; a twin first gets the job's."""
        recorder = self._recorder
        put_off = self._put_off[id(base_optimizer(optimizer))]
        if put_off and self._feed is not None:
            recorder.store(TensorKey(recorder.step, "data", "", role=READ_ON), np.array(put_off))
            for parameter in optimized_parameters(optimizer):
                if parameter.grad is not None:  # a sum over as many batches
                    parameter.grad.set_value(parameter.grad / (put_off + 1))
            self._feed.set_rate(recorder.step, optimizer)
        recorder.store_gradients("reduction")
        if self._feed is not None:
            self._feed.set_gradients(recorder.step, recorder.parameters())
        rate = np.asarray(optimizer.get_lr(), "float64")
        key = TensorKey(recorder.step, "optimizer input", "", role="learning rate")
        recorder.store(key, rate)
        names = [recorder.name_of(p) for p in optimized_parameters(optimizer)]
        names += recorder.recorded.optimizer_parameters(key)
        listed = json.dumps(sorted({name for name in names if name is not None}))
        text = np.frombuffer(listed.encode(), "uint8")
        recorder.store(key._replace(role="parameters"), text)

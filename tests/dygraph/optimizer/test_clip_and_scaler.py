"""What ranks agree on before a step: the norm of all gradients, the verdict of a GradScaler."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.amp import grad_scaler
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionScaler

from fleetpipe import fleet, log
from fleetpipe.dygraph.optimizer import clip_global
from fleetpipe.dygraph.optimizer import optimizer as scaling
from fleetpipe.dygraph.optimizer.clip_global import COPY, GlobalNormClip, replace_clips
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.mesh.axes import Degrees
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import VERSION
from fleetpipe.paddle_api.rehearsal import end_rehearsal, rehearse
from tests.groups import on_all, thread_members
from tests.pipelines import (
    batch,
    bits,
    enabled_scaler,
    half_precision,
    job,
    model_in_job,
    pipeline,
    sgd,
)

SHAPES = [(3, 5), (7,), (2, 2), (11,), (4, 6), (1,)]


def parameters(seed: int = 0, shapes: Sequence[Any] = SHAPES, dtype: str = "float32") -> list[Any]:
    """Parameters with random gradients."""
    numbers = np.random.default_rng(seed)
    found = []
    for shape in shapes:
        parameter = nn.Layer().create_parameter(list(shape), dtype=dtype)
        parameter.grad = paddle.to_tensor(numbers.standard_normal(shape).astype(dtype))
        found.append(parameter)
    return found


def pairs(of: Sequence[Any]) -> list[Any]:
    return [(parameter, parameter.grad.clone()) for parameter in of]


def clipped(clip: Any, of: Sequence[Any]) -> list[bytes]:
    return [gradient.numpy().tobytes() for _, gradient in clip(pairs(of))]


def on_two_ranks(axis: str, run: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``run(rank)`` returns on each of two ranks along an axis, which are threads."""
    here, members = threading.local(), thread_members(2)
    monkeypatch.setattr(clip_global, "current_job", lambda: here.job)

    def play(rank: int) -> Any:
        here.job = SimpleNamespace(
            local=False,
            degrees=Degrees(**{axis: 2}),
            group=lambda: members[rank],
            along=lambda other: members[rank] if other == axis else SoleGroup(),
        )
        return run(rank)

    results = on_all(2, play)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("norm", [0.5, 1e3])
@pytest.mark.parametrize("auto_skip", [False, True])
def test_stages_clip_with_the_bits_of_paddles_own_clip(
    norm: float, auto_skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = nn.ClipGradByGlobalNorm(norm, auto_skip_clip=auto_skip)
    everything = parameters()
    expected = clipped(stock, everything)
    # The stages of a vee: the first rank has the ends of the model.
    owned = [[0, 1, 5], [2, 3, 4]]

    def run(stage: int) -> list[bytes]:
        own = [everything[number] for number in owned[stage]]
        clip = GlobalNormClip(stock)
        clip.orders = {id(p): number for p, number in zip(own, owned[stage])}
        return clipped(clip, own)

    found = on_two_ranks("pp", run, monkeypatch)
    for numbers, gradients in zip(owned, found):
        assert gradients == [expected[number] for number in numbers]


def test_the_copies_of_a_twin_do_not_count_either() -> None:
    own, twins = parameters(), parameters(1)
    clip = GlobalNormClip(nn.ClipGradByGlobalNorm(0.5))
    clip.orders = {id(p): number or COPY for number, p in enumerate(own)}
    copied = copy.deepcopy(clip, {id(p): twin for p, twin in zip(own, twins)})
    copied(pairs(twins))
    squares = [float((p.grad**2).sum()) for p in twins[1:]]
    assert float(copied.norms[0]) == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64",)])
def test_gradients_of_several_dtypes_are_summed_as_paddle_does(dtypes: tuple[str, ...]) -> None:
    everything = [p for number, dtype in enumerate(dtypes) for p in parameters(number, dtype=dtype)]
    stock = nn.ClipGradByGlobalNorm(0.5)
    assert clipped(GlobalNormClip(stock), everything) == clipped(stock, everything)


def test_bfloat16_gradients_are_clipped_where_paddle_has_no_kernel() -> None:
    own = parameters()
    given = [(p, p.grad.astype("bfloat16")) for p in own[1:]]
    exact = [gradient.astype("float64").numpy() for _, gradient in given]
    clip = GlobalNormClip(nn.ClipGradByGlobalNorm(0.5))
    clip([(own[0], None), *given])
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in exact))
    assert float(clip.norms[0]) == pytest.approx(norm, rel=1e-6)
    for (_, gradient), before in zip(given, exact):
        assert np.allclose(gradient.astype("float64").numpy(), before * 0.5 / norm, rtol=0.01)


def test_every_clip_of_an_optimizer_is_replaced_once() -> None:
    first, second = parameters(0, [(2,)]), parameters(1, [(2,)])
    third = parameters(2, [(2,)])
    optimizer = paddle.optimizer.SGD(
        0.1,
        parameters=[
            {"params": first},
            {"params": second, "grad_clip": nn.ClipGradByGlobalNorm(2.0)},
            {"params": third, "grad_clip": nn.ClipGradByValue(2.0)},
        ],
        grad_clip=nn.ClipGradByGlobalNorm(1.0),
    )
    clips = replace_clips(optimizer)
    assert sorted(clip.clip_norm for clip in clips) == [1.0, 2.0]
    assert replace_clips(optimizer) == clips
    kinds = [type(group["grad_clip"]) for group in optimizer._param_groups]
    assert kinds == [GlobalNormClip, GlobalNormClip, nn.ClipGradByValue]
    assert all(isinstance(clip, nn.ClipGradByGlobalNorm) for clip in clips)


def test_members_with_other_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(part: int) -> None:
        own = parameters()[: 3 - part]
        GlobalNormClip(nn.ClipGradByGlobalNorm(1.0))(pairs(own))

    with pytest.raises(ConfigError, match="do not clip the same gradients"):
        on_two_ranks("mp", run, monkeypatch)


def states(scaler: Any) -> tuple[float, int, int]:
    state = scaler.state_dict()
    return float(state["scale"].item()), state["incr_count"], state["decr_count"]


@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_scaled_training_has_the_bits_of_paddles_own_scaler(scale: float) -> None:
    arguments = {"init_loss_scaling": scale, "incr_every_n_steps": 2}
    with job(3), half_precision():
        model = pipeline()
        single = model.layers.single_model()
        single.set_state_dict(model.layers.full_state_dict())
        optimizer = sgd(model)
        theirs = paddle.optimizer.SGD(0.1, parameters=single.parameters())
        ours, stock = enabled_scaler(**arguments), enabled_scaler(**arguments)
        for step in range(5):
            data = batch(seed=step)
            model.train_batch(data, optimizer, scaler=ours)
            for number in range(4):
                inputs, labels = (tensor[number * 2 : number * 2 + 2] for tensor in data)
                loss = nn.functional.cross_entropy(single(inputs), labels) * 0.25
                stock.scale(loss).backward()
            stock.step(theirs)
            stock.update()
            theirs.clear_grad()
            assert bits(model.layers.full_state_dict()) == bits(single.state_dict())
            assert states(ours) == states(stock)
        assert states(ours)[0] == 4 * scale


@pytest.mark.parametrize("wrap", [lambda scaler: scaler, MixPrecisionScaler])
def test_a_gradient_that_overflows_skips_the_step_and_lowers_the_scale(wrap: Any) -> None:
    with job(2), half_precision():
        model = pipeline()
        optimizer = sgd(model)
        scaler = enabled_scaler(init_loss_scaling=1024.0)
        weight = model.parameters()[0]
        hook = weight.register_hook(lambda gradient: gradient * float("inf"))
        before = bits(model.state_dict())
        rate = paddle.optimizer.lr.StepDecay(0.1, step_size=1)
        model.train_batch(batch(), optimizer, rate, scaler=wrap(scaler))
        assert bits(model.state_dict()) == before
        # The rate goes by batches, whether they stepped or not.
        assert rate.last_epoch == 1
        assert states(scaler) == (512.0, 0, 0)
        hook.remove()
        expected = float(model.eval_batch(batch(), compute_loss=True))
        loss = model.train_batch(batch(), optimizer, scaler=wrap(scaler))
        assert (float(loss), loss.stop_gradient) == (expected, True)  # without the scale
        assert bits(model.state_dict()) != before
        assert states(scaler) == (512.0, 1, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_large_scale_is_divided_out_as_paddles_own_scaler_does(dtype: str) -> None:
    if dtype == "float16":
        if VERSION.startswith("2."):
            pytest.skip("2.6.2 cannot rehearse: its casts cut digits off on a CPU")
        rehearse(dtype)
    parameters = [paddle.create_parameter([3], dtype) for _ in range(3)]
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    unscaled = []
    # Paddle's own takes float64 for float32, and fails.
    for make in (scaling.make_ranks_agree, lambda scaler: scaler)[: 1 if dtype == "float64" else 2]:
        for parameter in parameters:
            parameter.grad = paddle.to_tensor([1.0, -3.0, 1024.0]).astype(dtype)
        scaler = make(enabled_scaler(init_loss_scaling=2.0**26))
        scaler.unscale_(optimizer)
        unscaled.append([p.grad.numpy().tobytes() for p in parameters])
        assert not bool(scaler._found_inf)
        # In float16 the inverse of the scale is 0.
        assert float(parameters[2].grad.numpy()[2]) == 2**-16
    end_rehearsal()
    assert unscaled[0] == unscaled[-1]


def verdicts(found: list[bool], scales: list[float], monkeypatch: Any) -> list[Any]:
    """By how much each rank of a job moves a weight, after what it has found itself."""
    ranks = len(found)
    here = threading.local()
    monkeypatch.setattr(scaling, "current_job", lambda: here)
    groups = thread_members(ranks)

    def run(rank: int) -> float:
        here.everyone = lambda: groups[rank]
        linear = nn.Linear(1, 1)
        scaler = scaling.make_ranks_agree(enabled_scaler(init_loss_scaling=scales[rank]))
        optimizer = paddle.optimizer.SGD(1.0, parameters=linear.parameters())
        before = linear.weight.numpy()
        linear.weight.grad = paddle.full([1, 1], float("nan") if found[rank] else scales[rank])
        scaler.step(optimizer)
        return float((before - linear.weight.numpy()).item())

    return on_all(ranks, run)


def test_all_ranks_step_or_none(monkeypatch: Any) -> None:
    assert verdicts([False, True, False], [8.0] * 3, monkeypatch) == [0.0] * 3
    assert np.allclose(verdicts([False] * 3, [8.0] * 3, monkeypatch), 1.0)


def test_scalers_in_other_states_are_refused_on_every_rank(monkeypatch: Any) -> None:
    for result in verdicts([False] * 3, [8.0, 8.0, 4.0], monkeypatch):
        assert isinstance(result, ConfigError)
        assert "ranks 0 and 2" in str(result)
        assert "'scale': 4.0" in str(result)


def test_unscaling_twice_in_one_step_is_refused() -> None:
    with model_in_job(2) as model:
        scaler = fleet.distributed_scaler(enabled_scaler())
        optimizer = sgd(model)
        scaler.unscale_(optimizer)
        with pytest.raises(StateError, match="unscaled before"):
            scaler.unscale_(optimizer)


def test_a_scaler_that_switches_itself_off_does_so_before_the_first_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Paddle's auto_cast leaves the dtype that it was last used with there.
    monkeypatch.setattr(grad_scaler.amp_global_state(), "amp_dtype", "float32")
    with model_in_job(2) as model:
        scaler = enabled_scaler()
        with pytest.warns(UserWarning, match="not recommended"):
            model.train_batch(batch(), sgd(model), scaler=scaler)
        assert not scaler.is_enable()


def test_a_scaler_on_cpu_trains_as_none_does_and_that_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results = []
    log.once.cache_clear()
    for scaler in (None, fleet.distributed_scaler):
        with model_in_job(2) as model:
            made = None if scaler is None else scaler(paddle.amp.GradScaler(enable=False))
            optimizer = sgd(model)
            for seed in range(2):
                model.train_batch(batch(seed=seed), optimizer, scaler=made)
            results.append(bits(model.state_dict()))
    assert results[0] == results[1]
    assert caplog.text.count("a GradScaler does nothing on CPU") == 1

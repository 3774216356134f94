"""The norm of all ranks' gradients: every part once, in the single model's order and bits."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.optimizer import clip_global
from fleetpipe.dygraph.optimizer.clip_global import COPY, GlobalNormClip, replace_clips
from fleetpipe.errors import ConfigError
from fleetpipe.mesh import parts
from fleetpipe.mesh.axes import Degrees
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.parts import PartOfWhole, Region
from tests.dygraph import tied
from tests.dygraph.models import MODELS
from tests.groups import members, on_all
from tests.pipelines import ROWS, job, pipeline, sgd

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


class Ranks:
    """A job of several ranks in threads; what every thread sees as the current job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cut: str = "mp", **degrees: int) -> None:
        self.cut = cut
        self.degrees = Degrees(**degrees)
        self._here = threading.local()
        monkeypatch.setattr(clip_global, "current_job", lambda: self._here.job)

    def each(self, run: Any) -> list[Any]:
        """Returns what ``run(stage, shard, slice)`` returns on each rank."""
        sizes = self.degrees.pp, self.degrees.sharding, self.degrees.mp
        pipes = {(s, m): members(sizes[0]) for s in range(sizes[1]) for m in range(sizes[2])}
        shards = {(p, m): members(sizes[1]) for p in range(sizes[0]) for m in range(sizes[2])}
        slices = {(p, s): members(sizes[2]) for p in range(sizes[0]) for s in range(sizes[1])}

        def play(rank: int) -> Any:
            place = tuple(int(number) for number in np.unravel_index(rank, sizes))
            stage, shard, part = place
            self._here.job = SimpleNamespace(
                local=False,
                degrees=self.degrees,
                group=lambda: pipes[shard, part][stage],
                sharding=lambda: shards[stage, part][shard],
                along=lambda axis: slices[stage, shard][part] if axis == self.cut else SoleGroup(),
            )
            return run(*place)

        results = on_all(math.prod(sizes), play)
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

    def run(stage: int, *_: int) -> list[bytes]:
        own = [everything[number] for number in owned[stage]]
        clip = GlobalNormClip(stock)
        clip.orders = {id(p): number for p, number in zip(own, owned[stage])}
        return clipped(clip, own)

    found = Ranks(monkeypatch, pp=2).each(run)
    for numbers, gradients in zip(owned, found):
        assert gradients == [expected[number] for number in numbers]


def test_copies_of_a_tied_weight_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = parameters()[:5]
    expected = clipped(nn.ClipGradByGlobalNorm(0.5), everything)

    def run(stage: int, *_: int) -> list[bytes]:
        own = [everything[0], everything[2 * stage + 1], everything[2 * stage + 2]]
        if stage:
            own[0] = parameters()[0]
        own[0].is_firstly_shared = stage == 0
        clip = GlobalNormClip(nn.ClipGradByGlobalNorm(0.5))
        clip.orders = {id(p): number for number, p in enumerate(everything)}
        return clipped(clip, own)

    first, second = Ranks(monkeypatch, pp=2).each(run)
    assert first == [expected[0], expected[1], expected[2]]
    assert second == [expected[0], expected[3], expected[4]]


def test_the_copies_of_a_twin_do_not_count_either() -> None:
    own, twins = parameters(), parameters(1)
    clip = GlobalNormClip(nn.ClipGradByGlobalNorm(0.5))
    clip.orders = {id(p): number or COPY for number, p in enumerate(own)}
    copied = copy.deepcopy(clip, {id(p): twin for p, twin in zip(own, twins)})
    copied(pairs(twins))
    squares = [float((p.grad**2).sum()) for p in twins[1:]]
    assert float(copied.norms[0]) == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


@pytest.mark.parametrize("axis", ["mp", "rows"])
def test_shards_and_slices_count_once(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pp 2 x sharding 2 x mp 2: of each stage's two parameters one is cut in two slices.

    An axis that mesh does not have yet cuts them, too: a row of SHARDS and the part are enough.
    """
    for module in (parts, clip_global):
        monkeypatch.setattr(module, "SHARDS", tuple(dict.fromkeys(("mp", axis))))
    whole = {stage: parameters(stage, [(4, 6), (5,)]) for stage in range(2)}
    gradients = [p.grad for stage in whole.values() for p in stage]
    norm = math.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in gradients))

    def run(stage: int, shard: int, part: int) -> tuple[float, list[Any]]:
        cut, same = parameters(0, [(2, 6), (5,)])
        cut.grad = whole[stage][0].grad[2 * part : 2 * part + 2]
        if axis == "mp":
            cut.is_distributed = True
        else:
            cut.part_of_whole = PartOfWhole(part, Region(0, 2 * part, 2 * part + 2, 4), axis)
        same.grad = whole[stage][1].grad
        clip = GlobalNormClip(nn.ClipGradByGlobalNorm(0.5))
        clip.sharded = True
        own = (cut, same)[shard]
        factor = clip(pairs([own]))[0][1] / own.grad
        return float(clip.norms[0]), [float(factor.min()), float(factor.max())]

    found = Ranks(monkeypatch, axis, pp=2, sharding=2, mp=2).each(run)
    assert len({number for number, _ in found}) == 1
    for number, factors in found:
        assert number == pytest.approx(norm, rel=1e-6)
        assert factors == pytest.approx([0.5 / norm] * 2, rel=1e-6)


def test_a_rank_without_gradients_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = parameters()
    expected = clipped(nn.ClipGradByGlobalNorm(0.5), everything)

    def run(stage: int, *_: int) -> list[bytes]:
        return clipped(GlobalNormClip(nn.ClipGradByGlobalNorm(0.5)), everything if stage else [])

    assert Ranks(monkeypatch, pp=2).each(run) == [[], expected]


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tied", "gpt"])
def test_the_norm_of_a_pipeline_is_that_of_the_single_model(ranks: int, model: str) -> None:
    layers, loss = (tied.layers(), tied.loss) if model == "tied" else MODELS["gpt"][::2]
    with job(ranks):
        pipe = pipeline(layers if model == "tied" else layers(), loss_fn=loss)
        single = pipe.layers.single_model()
        single.set_state_dict(pipe.layers.full_state_dict())
        optimizer = sgd(pipe, grad_clip=nn.ClipGradByGlobalNorm(0.1))
        theirs = paddle.optimizer.SGD(
            0.1, parameters=single.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.1)
        )
        for step in range(3):
            data = MODELS["gpt"].batch(4, step)
            pipe.train_batch(data, optimizer)
            for number in range(4):
                inputs, labels = (t[number * ROWS : (number + 1) * ROWS] for t in data)
                (loss(single(inputs), labels) * 0.25).backward()
            squares = [float((p.grad.astype("float64") ** 2).sum()) for p in single.parameters()]
            theirs.step()
            theirs.clear_grad()
            assert optimizer.gradient_norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


def test_members_with_other_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(stage: int, shard: int, part: int) -> None:
        own = parameters()[: 3 - part]
        GlobalNormClip(nn.ClipGradByGlobalNorm(1.0))(pairs(own))

    with pytest.raises(ConfigError, match="do not clip the same gradients"):
        Ranks(monkeypatch, mp=2).each(run)

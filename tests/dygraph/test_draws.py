"""Draws of any generator in any place of a batch: alike under each schedule, known by the code."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import random
import sys
import weakref
from collections.abc import Callable
from random import uniform
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.vision.transforms import Normalize, RandomErasing

import fleetpipe
from fleetpipe import fleet
from fleetpipe.dygraph.function_code import draws_python
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests import pipelines
from tests.pipelines import CLASSES, FEATURES, batch, model_in_job, pipeline, sgd

HIDDEN = 8
MICRO_BATCHES = 4

Draw = Callable[[Any], Any]


def of_paddle(like: Any) -> Any:
    return 0.1 * paddle.randn(like.shape)


def of_numpy(like: Any) -> Any:
    return paddle.to_tensor(0.1 * np.random.randn(*like.shape).astype("float32"))


def of_python(like: Any) -> Any:
    return paddle.full(like.shape, random.gauss(0, 0.1))


class Placed(nn.Layer):
    """A layer with a weight that draws in one place."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(HIDDEN, HIDDEN), draw


class InForward(Placed):
    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.draw(x)


class DropPath(Placed):
    """Drops its branch by one number for a micro-batch."""

    def forward(self, x: Any) -> Any:
        return x if float(self.draw(x[:1, :1]).sum()) > 0 else x + self.inner(x)


class InHookOfValue(Placed):
    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        if not y.stop_gradient:
            y.register_hook(lambda grad: grad + self.draw(grad))
        return paddle.tanh(y)


class InTwoHooks(Placed):
    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        for value in (y, z := paddle.tanh(y)):
            if not value.stop_gradient:
                value.register_hook(lambda grad: grad * (1 + self.draw(grad)))
        return z


class InHookOfWeight(Placed):
    """As DP-SGD without its clip: noise on the gradient of each micro-batch."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        for parameter in self.inner.parameters():
            parameter.register_hook(lambda grad: grad + self.draw(grad))

    def forward(self, x: Any) -> Any:
        return paddle.tanh(self.inner(x))


DRAWS = [of_paddle, of_numpy, of_python]


class NoisyGradient(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any, draw: Draw) -> Any:
        ctx.draw = draw
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad + ctx.draw(grad)


class InPyLayer(Placed):
    def forward(self, x: Any) -> Any:
        return NoisyGradient.apply(self.inner(x), self.draw)


class InRecompute(Placed):
    """Paddle's own recompute around a layer that draws in its forward and in a hook."""

    def forward(self, x: Any) -> Any:
        return x + fleet.utils.recompute(self.piece, x)

    def piece(self, x: Any) -> Any:
        y = self.inner(x) + self.draw(x)
        if not y.stop_gradient:
            y.register_hook(lambda grad: grad + self.draw(grad))
        return paddle.tanh(y)


KINDS = [
    InForward,
    DropPath,
    InHookOfValue,
    InTwoHooks,
    InHookOfWeight,
    InPyLayer,
    InRecompute,
]
#: pp, chunks, schedule, options of the model.
LAYOUTS: list[tuple[int, int, str, dict[str, Any]]] = [
    (1, 1, "1F1B", {}),
    (3, 1, "1F1B", {}),
    (2, 1, "ZBH1", {}),
    (2, 2, "ZBV", {}),
    (2, 2, "DualPipeV", {}),
    (2, 1, "1F1B", {"recompute_interval": 1, "recompute_ctx": {"mp_group": None}}),
]


def layers(kind: type[Placed], draw: Draw) -> list[Any]:
    return [
        LayerDesc(nn.Linear, FEATURES, HIDDEN),
        *(LayerDesc(kind, draw) for _ in range(3)),
        LayerDesc(nn.Linear, HIDDEN, CLASSES),
    ]


def hashed(
    kind: type[Placed],
    draw: Draw,
    layout: tuple[int, int, str, dict[str, Any]],
    between: Callable[[Any], object] = lambda model: None,
    **own: Any,
) -> str:
    """Trains two steps; returns the hash of the weights, and what the script draws then."""
    pp, chunks, schedule, options = layout
    pipelines.begin(pp, MICRO_BATCHES, schedule, **{"sums": "tree", **own})
    paddle.seed(3)
    np.random.seed(3)
    random.seed(3)
    model = pipeline(layers(kind, draw), num_virtual_pipeline_stages=chunks, **options)
    optimizer = sgd(model)
    for step in range(2):
        model.train_batch(batch(MICRO_BATCHES, step), optimizer)
        between(model)
    drawn = paddle.rand([1]).item(), np.random.rand(), random.random()
    result = f"{fleetpipe.model_hash(model)} {drawn}"
    fleet.shutdown()
    return result


#: What a PyLayer is handed to draw by, its code does not name; Paddle 2.6.2's recompute is one.
PADDLES_ALONE = {InPyLayer, *([InRecompute] if paddle.__version__.startswith("2.") else [])}


@pytest.mark.parametrize(
    ("kind", "draw"),
    [(k, d) for k in KINDS for d in DRAWS if k not in PADDLES_ALONE or d is of_paddle],
)
def test_draws_do_not_depend_on_schedule_and_cut(kind: type[Placed], draw: Draw) -> None:
    results = {str(layout[:3]): hashed(kind, draw, layout) for layout in LAYOUTS}
    assert len(set(results.values())) == 1, results
    assert results["(1, 1, '1F1B')"] != hashed(kind, lambda like: 0 * like, LAYOUTS[0])


@pytest.mark.parametrize(
    ("pp", "order", "kind"),
    [
        (2, "fixed", InHookOfWeight),
        (2, "ready", InHookOfValue),
        (2, "ready", InRecompute),
        (3, "ready", InPyLayer),
    ],
)
def test_ranks_draw_what_one_process_draws(
    on_ranks: Callable[..., Any], pp: int, order: str, kind: type[Placed]
) -> None:
    for draw in (of_paddle,) if kind in PADDLES_ALONE else (of_paddle, of_numpy):
        expected = hashed(kind, draw, LAYOUTS[0])
        layout = (pp, 1, "1F1B", {})
        assert (
            on_ranks(functools.partial(hashed, order=order), pp, kind, draw, layout)
            == [expected] * pp
        )


EVALUATIONS: dict[str, Callable[[Any], object]] = {
    "loss": lambda model: model.eval_batch(batch(MICRO_BATCHES), compute_loss=True),
    "outputs": lambda model: model.eval_batch(batch(MICRO_BATCHES), compute_loss=False),
    "prediction": lambda model: model.predict_batch(batch(MICRO_BATCHES)[0]),
    "fewer rows": lambda model: model.predict_batch(batch(2)[0]),
    "twice": lambda model: [model.predict_batch(batch(3)[0]) for _ in range(2)],
}


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("draw", DRAWS)
def test_an_evaluation_between_batches_changes_no_later_draw(name: str, draw: Draw) -> None:
    layout = (2, 1, "1F1B", {})
    expected = hashed(InForward, draw, layout)
    assert hashed(InForward, draw, layout, EVALUATIONS[name]) == expected


def test_evaluations_draw_anew_each_time_and_again_from_the_same_seed_or_state() -> None:
    with pipelines.begun(pipelines.strategy(2, pp=2)):
        model = pipeline([LayerDesc(nn.Linear, FEATURES, HIDDEN), InForward(of_paddle)])

        def outputs(count: int) -> list[bytes]:
            return [model.predict_batch(batch(2)[0]).numpy().tobytes() for _ in range(count)]

        paddle.seed(4)
        first = outputs(3)
        paddle.seed(4)
        again, state = outputs(1), paddle.get_rng_state()
        assert again == first[:1]
        assert outputs(2) == first[1:]
        paddle.set_rng_state(state)
        assert outputs(1) == first[1:2]
    assert len(set(first)) == 3


class Langevin(paddle.optimizer.SGD):
    """SGLD: noise in the step."""

    draw: Draw = staticmethod(of_paddle)
    seen: ClassVar[list[np.ndarray]] = []

    def step(self) -> None:
        for parameter in self._parameter_list:
            noise = self.draw(parameter)
            self.seen.append(noise.numpy().ravel())
            parameter.grad.set_value(parameter.grad + noise)
        super().step()


class LangevinOfNumpy(Langevin):
    draw = staticmethod(of_numpy)


def noises(kind: type[Langevin]) -> list[np.ndarray]:
    """What the steps of one rank draw; no layer of it draws anything."""
    ranks = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    pipelines.begin(max(2, ranks), 2, allow=[f"optimizer:{kind.__name__}"])
    paddle.seed(1)
    np.random.seed(1)
    kind.seen = []
    blocks = [LayerDesc(nn.Linear, HIDDEN, HIDDEN) for _ in range(4)]
    ends = LayerDesc(nn.Linear, FEATURES, HIDDEN), LayerDesc(nn.Linear, HIDDEN, CLASSES)
    model = pipeline([ends[0], *blocks, ends[1]])
    optimizer = fleet.distributed_optimizer(kind(0.1, parameters=model.parameters()))
    steps = []
    for step in range(4):
        kind.seen.clear()
        model.train_batch(batch(2, step), optimizer)
        steps.append(np.concatenate(kind.seen))
    fleet.shutdown()
    return steps


@pytest.mark.parametrize("kind", [Langevin, LangevinOfNumpy])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_two_steps_and_no_two_ranks_share_the_noise_of_an_optimizer(
    on_ranks: Callable[..., Any], kind: type[Langevin], ranks: int
) -> None:
    drawn = [one for of_rank in on_ranks(noises, ranks, kind) for one in of_rank]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            size = min(len(one), len(other))
            for shift in range(4):
                related = np.corrcoef(one[shift:size], other[: size - shift])[0, 1]
                assert abs(related) < 0.5


def test_rng_fleet_beside_sums_by_a_tree_is_refused() -> None:
    with pytest.raises(fleetpipe.errors.ConfigError, match="rng='fleet'"):
        hashed(InForward, of_paddle, LAYOUTS[1], rng="fleet")
    fleet.shutdown()


class Weighed(nn.Layer):
    """A loss with two parameters, to whose gradients hooks add noise."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, float] = {}
        for name in ("one", "other"):
            setattr(self, name, self.create_parameter([1]))
            getattr(self, name).register_hook(functools.partial(self.note, name))

    def note(self, name: str, grad: Any) -> Any:
        self.drawn[name] = float(paddle.randn([]))

    def forward(self, output: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(output, label) * (self.one + self.other).sum()


def test_the_parameters_of_a_loss_draw_their_own_numbers() -> None:
    loss = Weighed()
    with model_in_job(2, loss_fn=loss) as model:
        model.train_batch(batch(), sgd(model))
    assert len({*loss.drawn.values()}) == 2


def helper() -> float:
    return uniform(0, 1)


class Calls(nn.Layer):
    """Draws in a method that its forward calls, by a function of its own."""

    def forward(self, x: Any) -> Any:
        return self.scaled(x)

    def scaled(self, x: Any) -> Any:
        return x * helper()


class Quiet(nn.Layer):
    """Draws its weight only, and by Paddle's generator, though that is called random too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = np.random.rand()

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(x, float(np.mean([self.scale])))


def imports_late(x: Any) -> Any:
    import random as late

    return x * late.random()


def within(x: Any) -> Any:
    return next(x * np.random.rand() for _ in range(2))


def closing(generator: Any) -> Any:
    return lambda x: x * generator()


@dataclasses.dataclass
class Weighted:
    """Compares by value, and so has no hash."""

    weight: float = 1.0

    def __call__(self, x: Any) -> Any:
        return x * self.weight * helper()


class Noise:
    """Draws in a method, a property and a class method, and is not called itself."""

    def scaled(self, x: Any) -> Any:
        return x * helper()

    @property
    def factor(self) -> float:
        return helper()

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x * helper()


class Slotted:
    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function


class Has(nn.Layer):
    """Has something in an attribute, by which its forward may draw."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Any) -> Any:
        return x


class DrawsInProperty(nn.Layer):
    @property
    def factor(self) -> float:
        return helper()

    def forward(self, x: Any) -> Any:
        return x * self.factor


class Hooked(nn.Linear):
    def __init__(self, when: str) -> None:
        super().__init__(2, 2)
        getattr(self, f"register_forward_{when}_hook")(lambda *values: values[-1] * helper())


TABLE = {"scale": [helper]}
THIS_MODULE = sys.modules[__name__]

CASES: list[tuple[Any, bool]] = [
    (Calls(), True),
    (nn.Sequential(nn.Linear(2, 2), nn.Sequential(Calls())), True),
    (imports_late, True),
    (within, True),
    (closing(random.random), True),
    (functools.partial(within), True),
    (Quiet(), False),
    (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), False),
    (paddle.rand, False),
    (closing(np.random.default_rng(0).random), False),
    (closing(helper), True),
    (Weighted(), True),
    (lambda x: THIS_MODULE.helper() * x, True),
    (lambda x: THIS_MODULE.paddle.rand([2]) * x, False),
    (lambda x: TABLE["scale"][0]() * x, True),
    (lambda x: 2 * Noise.of_class(x), True),
    (closing(closing(helper)), True),
    (Noise().scaled, True),
    (Has(Noise()), True),
    (Has([helper]), True),
    (Has({"rate": (0.1, {"by": random.gauss})}), True),
    (Has(np.random), True),
    (Has(Slotted(helper)), True),
    (Has(functools.partial(max, key=helper)), True),
    (Has(RandomErasing()), True),
    (Has(Normalize()), False),
    (Has([0.5, "relu", paddle.ones([2]), nn.functional.relu, np.random.default_rng(0)]), False),
    (DrawsInProperty(), True),
    (Hooked("pre"), True),
    (nn.Sequential(Hooked("post")), True),
]


@pytest.mark.parametrize(("function", "draws"), CASES)
def test_what_names_a_generator_draws(function: Any, draws: bool) -> None:
    assert draws_python(function) is draws


def test_nothing_that_a_function_holds_outlives_it() -> None:
    held = paddle.ones([2])
    gone = weakref.ref(held)
    # As a forward makes a hook of each of its outputs.
    assert not draws_python(lambda grad, held=held: grad * held)
    del held
    gc.collect()
    assert gone() is None

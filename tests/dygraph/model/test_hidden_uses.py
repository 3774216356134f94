"""What stages use behind the back of the list: right in one process alone, and refused there."""

from __future__ import annotations

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.errors import BoundaryError, ConfigError, FleetPipeError, StateError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.pipelines import (
    batch,
    bits,
    job,
    mlp_and_sgd,
    mlp_layers,
    model_in_job,
    pipeline,
    sgd,
    train,
)

functional = nn.functional
KEPT: Any = None
RECOMPUTE = {"recompute_interval": 1, "recompute_ctx": {}}
WAYS = [("1F1B", {}), ("ZBH1", {}), ("Interleaved1F1B", {}), ("1F1B", RECOMPUTE)]


class Uses(nn.Layer):
    """A layer with a part that it is handed."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any) -> Any:
        return self.part(x)


def with_weight(weight: Any, x: Any) -> Any:
    return functional.linear(x, weight)


def hidden_references(first: Any, last: Any) -> dict[str, Callable[[], Any]]:
    """Functions that use a weight of a layer that stands at the other end of the list."""
    holder, queue, board = [first], deque([first]), SimpleNamespace(layer=first)
    cached = functools.cache(lambda: first)

    def by_default(x: Any, weight: Any = first.weight) -> Any:
        return with_weight(weight, x)

    return {
        "closure": lambda: lambda x: with_weight(first.weight, x),
        "partial": lambda: functools.partial(with_weight, first.weight),
        "partial of a layer": lambda: functools.partial(lambda layer, x: layer(x), first),
        "default": lambda: by_default,
        "container": lambda: lambda x: holder[0](x) * 1.0,
        "queue": lambda: lambda x: queue[0](x) * 1.0,
        "namespace": lambda: lambda x: board.layer(x) * 1.0,
        "cache": lambda: lambda x: cached()(x) * 1.0,
        "forwards": lambda: lambda x: with_weight(last.weight, x),
    }


@pytest.mark.parametrize(
    ("kind", "schedule", "options"),
    [
        *((kind, *WAYS[0]) for kind in hidden_references(nn.Linear(1, 1), None)),
        *((kind, *way) for way in WAYS[1:] for kind in ("partial of a layer", "forwards", "loss")),
        ("loss", *WAYS[0]),
    ],
)
def test_a_weight_of_another_rank_is_refused_before_the_step(
    kind: str, schedule: str, options: dict[str, Any]
) -> None:
    layers: list[Any] = [nn.Linear(6, 6) for _ in range(5)]
    first, last = layers[0], layers[-1]
    loss_fn: Any = nn.CrossEntropyLoss()
    if kind == "loss":
        loss_fn = lambda output, label: (first.weight**2).sum() + (output - label).mean()  # noqa: E731
    else:
        layers.insert(0 if kind == "forwards" else 4, hidden_references(first, last)[kind]())
    with model_in_job(2, 4, schedule, layers=layers, loss_fn=loss_fn, **options) as model:
        before = bits(model.layers.state_dict())
        with pytest.raises(ConfigError, match=r"[05]\.weight on rank [01](.|\n)*SharedLayerDesc"):
            model.train_batch(batch(), sgd(model))
        assert bits(model.layers.state_dict()) == before


def later_uses() -> list[str]:
    """What a rank, or one process, is told of later uses of another's weight without gradient."""
    texts = []
    for evaluates in (False, True):
        first, uses = nn.Linear(6, 4), []

        def late(x: Any, first: Any = first, uses: list[bool] = uses) -> Any:
            return x + first.bias.detach() if uses else x

        layers = [first, functional.tanh, nn.Linear(4, 4), late]
        with mlp_and_sgd(2, layers=layers) as (model, optimizer):
            model.train_batch(batch(), optimizer)
            uses.append(True)
            evaluate = functools.partial(model.eval_batch, compute_loss=True)
            with pytest.raises(FleetPipeError) as refusal:
                (evaluate if evaluates else model.forward_backward_pipeline)(batch())
            assert first.bias.shape == first(paddle.ones([6])).shape
            texts.append(str(refusal.value))
    return texts


def test_a_weight_of_another_rank_is_out_of_reach_in_all_batches(on_ranks: Any) -> None:
    for text in chain(later_uses(), *on_ranks(later_uses, 2)):
        assert "stages use parameters that are of no layer of theirs" in text


def test_a_layer_in_the_arguments_of_two_descriptions_is_refused() -> None:
    part = nn.Linear(6, 6)
    layers = [LayerDesc(Uses, part), LayerDesc(nn.Linear, 6, 6), LayerDesc(Uses, part)]
    with job(2), pytest.raises(ConfigError, match="have the same parameter"):
        PipelineLayer(layers, num_stages=2)


class Keeps(nn.Layer):
    """Keeps what a later layer needs where `keep` puts it."""

    def __init__(self, keep: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(6, 6), keep

    def forward(self, x: Any) -> Any:
        self.keep((x > 0).astype("float32"))
        return self.linear(x)


class Masks(nn.Layer):
    """Multiplies by what `find` finds."""

    def __init__(self, find: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.find = nn.Linear(6, 4), find

    def forward(self, x: Any) -> Any:
        return self.linear(x * self.find())


class Board:
    mask: Any = None


def keep_global(mask: Any) -> None:
    global KEPT
    KEPT = mask


def ways_around(entry: Any) -> dict[str, tuple[Callable[[Any], object], Callable[[], Any]]]:
    held: dict[str, Any] = {"default": paddle.ones([2, 6])}
    deep: dict[str, Any] = {}
    board, listed = Board(), [paddle.ones([2, 6])]
    return {
        "dict": (lambda mask: held.update(mask=mask), lambda: held["mask"]),
        "dict with a default": (lambda m: held.update(default=m), lambda: held["default"]),
        "dict in a dict": (
            lambda mask: deep.setdefault("here", {}).update(mask=(mask,)),
            lambda: deep["here"]["mask"][0],
        ),
        "attribute": (lambda mask: setattr(board, "mask", mask), lambda: board.mask),
        "class": (lambda mask: setattr(Board, "mask", mask), lambda: Board.mask),
        "variable": (keep_global, lambda: KEPT),
        "list": (lambda mask: listed.__setitem__(0, mask), lambda: listed[0]),
        "array": (
            lambda mask: held.update(array=mask.numpy()),
            lambda: paddle.to_tensor(held["array"]),
        ),
    }


@pytest.mark.parametrize(("schedule", "options"), WAYS[:2])
@pytest.mark.parametrize("kind", [*ways_around(None)])
def test_a_value_that_goes_around_the_stages_is_refused(
    kind: str, schedule: str, options: dict[str, Any]
) -> None:
    keep, find = ways_around(None)[kind]
    with job(2, 4, schedule):
        model = pipeline([Keeps(keep), nn.Linear(6, 6), Masks(find)])
        with pytest.raises(BoundaryError, match="leaves beside what it returns"):
            model.train_batch(batch(), sgd(model))


def test_what_no_other_rank_needs_is_used_as_ever() -> None:
    """Layers beside the list, what a function caches, and what the script alone looks at."""
    part, teacher, seen = nn.Linear(6, 6), nn.Linear(4, 4), dict[str, Any]()
    masks = functools.cache(lambda width: paddle.arange(width, dtype="float32"))

    def masked(x: Any) -> Any:
        return x * masks(x.shape[-1])

    def second(mask: Any) -> None:
        seen.update(second=mask, count=seen.get("count", 0) + 1)

    ends = nn.Linear(6, 6), nn.Linear(6, 4)
    for middle in (
        [lambda x: part(x) * 2.0],
        [masked, nn.Linear(6, 6), masked],
        [Keeps(lambda mask: seen.update(first=mask)), nn.Linear(6, 6), Keeps(second)],
    ):
        seen.clear()
        one, two = (
            train(
                copy.deepcopy([ends[0], *middle, ends[1]]),
                pp,
                loss_fn=lambda output, label: functional.cross_entropy(teacher(output), label),
            )
            for pp in (1, 2)
        )
        assert one == two
    assert {*seen} == {"first", "second", "count"}
    assert all(isinstance(seen[name], paddle.Tensor) for name in ("first", "second"))


class Halved(PipelineLayer):
    def forward(self, *args: Any, **named: Any) -> Any:
        return super().forward(*args, **named) * 0.5


class Headed(PipelineLayer):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.head = nn.Linear(4, 4)


class Criterion(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(2.0))

    def forward(self, output: Any, label: Any) -> Any:
        return functional.cross_entropy(output * self.scale, label)


@pytest.mark.parametrize(("kind", "match"), [(Halved, "Halved.forward"), (Headed, "head.weight")])
def test_a_class_that_runs_more_than_its_list_is_refused_when_it_is_wrapped(
    kind: type[PipelineLayer], match: str
) -> None:
    with job(2):
        model = kind(mlp_layers(), num_stages=2, loss_fn=nn.CrossEntropyLoss())
        with pytest.raises(ConfigError, match=match):
            fleet.distributed_model(model)


def test_a_loss_and_frozen_layers_may_be_attributes_too() -> None:
    with job(2):
        layers = PipelineLayer(mlp_layers(), num_stages=2, loss_fn=(loss := Criterion()))
        layers.criterion, layers.teacher = loss, nn.Linear(4, 4)
        for parameter in layers.teacher.parameters():
            parameter.stop_gradient = True
        model = fleet.distributed_model(layers)
        clip = nn.ClipGradByGlobalNorm(0.01)
        parameters = [p for p in layers.parameters() if not p.stop_gradient]
        optimizer = paddle.optimizer.SGD(1.0, parameters=parameters, grad_clip=clip)
        model.train_batch(batch(), fleet.distributed_optimizer(optimizer))
        assert loss.scale.item() != 2.0


@pytest.mark.parametrize("frozen", [True, False])
def test_an_adapter_in_a_layer_of_several_ranks_is_refused_unless_it_is_frozen(
    frozen: bool,
) -> None:
    description = functools.partial(
        SharedLayerDesc, "tied", nn.Linear, shared_weight_attr="weight", in_features=6
    )
    layers = [description(out_features=6), nn.Linear(6, 6), description(out_features=6)]
    with model_in_job(2, layers=[*layers, nn.Linear(6, 4)]) as model:
        adapted = Uses(model.layers.shared_layers["tied"])
        adapted.more = nn.Linear(2, 2)
        for parameter in adapted.more.parameters():
            parameter.stop_gradient = frozen
        model.layers.shared_layers["tied"] = adapted
        if frozen:
            model.train_batch(batch(), sgd(model))
        else:
            with pytest.raises(ConfigError, match=r"tied\.more\.weight"):
                model.train_batch(batch(), sgd(model))


def test_a_layer_that_was_taken_out_or_put_into_the_list_of_functions_is_named() -> None:
    with mlp_and_sgd(2) as (model, optimizer):
        model.layers.run_function[0] = nn.Identity()
        with pytest.raises(ConfigError, match="setattr"):
            model.train_batch(batch(), optimizer)
    with mlp_and_sgd(2) as (model, optimizer):
        model.train_batch(batch(), optimizer)
        del model.layers._sub_layers["2"]
        with pytest.raises(ConfigError, match="2 was taken out"):
            model.train_batch(batch(), optimizer)


def test_steps_may_come_from_other_threads_and_not_two_at_once() -> None:
    errors: list[Exception] = []
    expected = train(steps=3).losses
    paddle.seed(0)
    with mlp_and_sgd(2) as (model, optimizer):
        losses: list[bytes] = []

        def step(number: int) -> None:
            losses.append(model.train_batch(batch(seed=number), optimizer).numpy().tobytes())

        for number in range(3):
            thread = threading.Thread(target=step, args=(number,))
            thread.start()
            thread.join()
        assert losses == expected

        def evaluate(_gradient: Any = None) -> None:
            try:
                model.eval_batch(batch(), compute_loss=True)
            except StateError as error:
                errors.append(error)

        def beside(_gradient: Any) -> None:
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

        for hook in (evaluate, beside):
            handle = model.parameters()[0].register_hook(hook)
            model.train_batch(batch(), optimizer)
            handle.remove()
    assert len(errors) == 8
    assert "a batch runs already" in str(errors[0])


def test_a_copy_of_a_wrapped_model_is_one_of_its_own() -> None:
    with mlp_and_sgd(2, 4, "ZBV") as (model, optimizer):
        model.train_batch(batch(), optimizer)
        other = copy.deepcopy(model)
        before = bits(other.layers.full_state_dict())
        assert before == bits(model.layers.full_state_dict())
        losses = [model.train_batch(batch(seed=seed), optimizer) for seed in (1, 2)]
        assert bits(other.layers.full_state_dict()) == before
        copied = sgd(other)
        for seed, loss in zip((1, 2), losses):
            again = other.train_batch(batch(seed=seed), copied)
            assert again.numpy().tobytes() == loss.numpy().tobytes()


class Counted(nn.Layer):
    """Says something else in its own state than a model with it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.linear(x)

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {"calls": 3, **{f"renamed.{n}": t for n, t in self.linear.state_dict().items()}}


def test_a_state_dict_of_a_layers_own_is_not_asked_for(tmp_path: Any) -> None:
    with model_in_job(2, layers=[LayerDesc(Counted), nn.Linear(6, 4)]) as model:
        model.train_batch(batch(), sgd(model))
        state = model.layers.full_state_dict()
        assert [*state] == ["0.linear.weight", "0.linear.bias", "1.weight", "1.bias"]
        model.layers.save_state_dict(tmp_path)
        model.train_batch(batch(), sgd(model))
        model.layers.set_state_dir(tmp_path)
        assert bits(model.layers.full_state_dict()) == bits(state)

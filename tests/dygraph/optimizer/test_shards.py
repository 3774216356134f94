"""Optimizers of several ranks: sums of replicas, shares of the state, ranks with less to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.dygraph.layer_kinds import broadcast_state
from fleetpipe.dygraph.optimizer.replicas import Shards, assign_owners, reduce_all, reduce_gradients
from fleetpipe.dygraph.tensor_parallel.sequence import mark_as_sequence_parallel_parameter, marked
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer
from fleetpipe.mesh import Degrees, SoleGroup
from tests.groups import on_all, thread_members
from tests.launching import JobFailed
from tests.pipelines import ROWS, batch, job, mlp_layers, pipeline

SHAPES = [[4, 6], [6], [6, 3], [3], [3, 3]]


class Layers(paddle.nn.Layer):
    """Parameters of several sizes with the same values whenever it is made."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        numbers = np.random.default_rng(0)
        for index, shape in enumerate(shapes):
            parameter = self.create_parameter(shape)
            parameter.set_value(numbers.standard_normal(shape).astype("float32"))
            self.add_parameter(str(index), parameter)

    def give_gradients(self, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        for parameter in self.parameters():
            gradient = paddle.to_tensor(numbers.standard_normal(parameter.shape).astype("float32"))
            if hasattr(parameter, "main_grad"):
                parameter.main_grad = gradient
            else:
                parameter.grad = gradient


def adamw(parameters: list[Any]) -> Any:
    return paddle.optimizer.AdamW(0.1, parameters=parameters)


def momentum(parameters: list[Any]) -> Any:
    return paddle.optimizer.Momentum(0.1, parameters=parameters, weight_decay=0.1)


def groups(parameters: list[Any]) -> Any:
    return paddle.optimizer.Adam(
        0.1,
        parameters=[
            {"params": parameters[:2], "weight_decay": 0.1},
            {"params": parameters[2:], "learning_rate": 0.5},
        ],
    )


def mixed(parameters: list[Any]) -> Any:
    return MixPrecisionOptimizer(adamw(parameters))


@pytest.mark.parametrize(
    ("make", "shapes"),
    [(adamw, SHAPES), (momentum, SHAPES), (groups, SHAPES), (mixed, SHAPES), (adamw, [[4, 6]])],
)
def test_members_step_their_shares_and_get_the_rest(make: Any, shapes: list[list[int]]) -> None:
    def layers() -> Layers:
        made = Layers(shapes)
        if make is mixed:
            MixPrecisionLayer(made, dtype="bfloat16")
        return made

    whole = layers()
    optimizer = make(whole.parameters())
    for seed in range(3):
        whole.give_gradients(seed)
        optimizer.step()
    expected = [parameter.numpy().tobytes() for parameter in whole.parameters()]
    state = optimizer.state_dict()
    group = thread_members(2)
    nothing: list[int] = []

    def run(rank: int) -> tuple[list[bytes], int, int]:
        own = layers()
        theirs = make(own.parameters())
        shards = Shards(theirs, group[rank])
        for seed in range(3):
            own.give_gradients(seed)
            shards.step(theirs.step, lambda: nothing.append(rank))
            theirs.clear_grad()
            assert not any(
                float(getattr(p, "main_grad", p.grad).abs().max()) for p in own.parameters()
            )
        held = [value for value in theirs.state_dict().values() if hasattr(value, "size")]
        stepped = [parameter.numpy().tobytes() for parameter in own.parameters()]
        return stepped, sum(int(value.size) for value in held), len(held)

    found = on_all(2, run)
    for result in found:
        if isinstance(result, Exception):
            raise result
    assert [stepped for stepped, _, _ in found] == [expected] * 2
    everything = [value for value in state.values() if hasattr(value, "size")]
    assert sum(count for _, _, count in found) == len(everything)
    sizes = [size for _, size, _ in found]
    assert sum(sizes) == sum(int(value.size) for value in everything)
    if len(shapes) > 1:
        assert max(sizes) < 0.6 * sum(sizes)
        assert not nothing
    else:
        assert nothing == [1, 1, 1]


def test_owners_share_the_numbers_evenly_and_all_ranks_find_the_same() -> None:
    parameters = Layers(SHAPES).parameters()
    found = [assign_owners(parameters, 2)[id(parameter)] for parameter in parameters]
    shards = Shards(adamw(parameters), thread_members(2)[0])
    # A trainer finds out by name who keeps the state of a parameter.
    assert [shards.ranks_by_name()[parameter.name] for parameter in parameters] == found
    assert [not shards.owns(parameter) for parameter in parameters] == found
    again = Layers(SHAPES).parameters()
    assert [assign_owners(again, 2)[id(parameter)] for parameter in again] == found
    load = [0, 0]
    for parameter, owner in zip(parameters, found):
        load[owner] += int(parameter.size)
    assert load == [30, 30]


def test_parameters_without_a_gradient_are_not_sent() -> None:
    layers = Layers(SHAPES)
    layers.give_gradients(0)
    layers.parameters()[2].clear_gradient(False)
    optimizer = momentum(layers.parameters())

    sent: list[tuple[list[int], int]] = []

    class Group:
        rank, ranks = 1, 2

        def broadcast_each(self, tensors: list[tuple[Any, int]]) -> None:
            sent.extend((list(tensor.shape), source) for tensor, source in tensors)

    group: Any = Group()
    shards = Shards(optimizer, group)
    shards.step(optimizer.step, lambda: None)
    owner = {id(p): int(shards.owns(p)) for p in layers.parameters()}
    assert [list(p.shape) for p in layers.parameters() if owner[id(p)]] == [[6, 3], [3], [3, 3]]
    with_gradients = [p for p in layers.parameters() if p is not layers.parameters()[2]]
    assert sent == [(list(p.shape), owner[id(p)]) for p in with_gradients]


def test_a_rank_that_trains_nothing_steps_nothing() -> None:
    only = Layers([[1]]).parameters()[0]
    only.is_placeholder, only.stop_gradient = True, True  # what stands for an empty list
    for make in (adamw, momentum, mixed):
        optimizer = make([only])
        shards = Shards(optimizer, thread_members(2)[0])
        assert shards.step(lambda: "stepped", lambda: "nothing") == "nothing"
        assert list(optimizer._parameter_list) == [only]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_gradients_of_several_dtypes_are_reduced_in_their_own(share: float) -> None:
    """Of four parameters one has a gradient on one replica alone, and one on none."""
    group = thread_members(2)
    shapes = [([3], "float32"), ([2, 2], "bfloat16"), ([], "float64"), ([5], "float32")]

    def run(rank: int) -> list[Any]:
        layer = paddle.nn.Layer()
        parameters = [layer.create_parameter(shape, dtype=dtype) for shape, dtype in shapes]
        for number, (parameter, (shape, dtype)) in enumerate(zip(parameters[:3], shapes)):
            if number != 1 or rank == 1:
                parameter.grad = paddle.full(shape, number + 2.0 * rank + 1.0).astype(dtype)
        member: Any = group[rank]

        def all_reduce(tensors: list[Any]) -> None:
            # On CPU Paddle has no kernel for a sum of bfloat16; Gloo and NCCL add such.
            for tensor in tensors:
                parts = [part.astype("float64") for part in member.all_gather(tensor.clone())]
                tensor.set_value((parts[0] + parts[1]).astype(tensor.dtype))

        member.all_reduce = all_reduce
        reduce_gradients(parameters, member, share)
        return [parameter.grad for parameter in parameters]

    for gradients in on_all(2, run):
        if isinstance(gradients, Exception):
            raise gradients
        assert gradients[3] is None
        for gradient, (shape, dtype), total in zip(gradients, shapes, (4.0, 4.0, 8.0)):
            assert (gradient.shape, str(gradient.dtype)) == (shape, f"paddle.{dtype}")
            assert np.all(gradient.astype("float32").numpy() == total * share)


def test_experts_count_the_tokens_of_members_once_unless_these_are_parts() -> None:
    """Two members have the same tokens, which reach a spread expert twice; or each has half."""
    layer = paddle.nn.Layer()
    parameters = whole, of_parts, _ = [layer.create_parameter([2]) for _ in range(3)]
    whole.no_sync = of_parts.no_sync = True
    mark_as_sequence_parallel_parameter(of_parts)
    for parameter in parameters:
        parameter.grad = paddle.full([2], 8.0)
    job: Any = SimpleNamespace(
        sums_by_tree=False, degrees=Degrees(mp=2, ep=2), copies=SoleGroup, expert_copies=SoleGroup
    )
    reduce_all(parameters, job, 0.5)
    assert [float(p.grad[0]) for p in parameters] == [2.0, 4.0, 4.0]
    # Its members hold different experts.
    assert marked(parameters) == []


def test_all_have_what_the_first_has_and_what_is_sent_is_a_copy() -> None:
    group = thread_members(2)
    sent: list[Any] = []

    def run(rank: int) -> tuple[list[float], float]:
        state = {"whole": paddle.full([2], rank + 1.0), "number": paddle.full([], rank + 5.0)}
        member: Any = group[rank]
        broadcast = member.broadcast

        def noting(value: Any, source: int) -> Any:
            sent.append((rank, value))
            return broadcast(value, source)

        member.broadcast = noting
        broadcast_state(state, member)
        found = state["whole"].tolist(), float(state["number"])
        state["whole"].set_value(paddle.full([2], -1.0))
        return found

    assert on_all(2, run) == [([1.0, 1.0], 5.0)] * 2
    (first,) = [value for rank, value in sent if rank == 0]
    assert [value for rank, value in sent if rank == 1] == [None]
    assert first["whole"].tolist() == [1.0, 1.0]


Clip = nn.ClipGradByGlobalNorm
Named = Mapping[str, Any]
optimizers = paddle.optimizer


def part(named: Named, *prefixes: str) -> list[Any]:
    """The parameters of some layers, which may all be those of another rank."""
    return [parameter for name, parameter in named.items() if name.startswith(prefixes)]


def frozen(named: Named, *prefixes: str) -> list[Any]:
    """Freezes some layers, and returns what is left to train."""
    for parameter in part(named, *prefixes):
        parameter.stop_gradient = True
    return [parameter for parameter in named.values() if not parameter.stop_gradient]


def two_groups(named: Named, empty: bool, *options: dict[str, Any]) -> list[Any]:
    """Two groups, one of each stage; with ``empty`` also that of the other rank."""
    both = [{"params": part(named, "0", "2"), **options[0]}]
    both += [{"params": part(named, "4", "6"), **options[1]}]
    return [group for group in both if group["params"] or empty]


class EachByItself(nn.ClipGradByGlobalNorm):
    """A script's own clip that looks at one gradient at a time."""

    def _dygraph_clip(self, params_grads: list[Any]) -> list[Any]:
        return [(p, g / (1 + g.abs().max())) for p, g in params_grads]


class Halved(nn.ClipGradByGlobalNorm):
    """A script's own clip by the norm of all gradients."""

    def _dygraph_clip(self, params_grads: list[Any]) -> list[Any]:
        return [(p, g / 2) for p, g in super()._dygraph_clip(params_grads)]


Make = Callable[[Named], Any]
HALF, TENTH = {"learning_rate": 0.5}, {"learning_rate": 0.1}
MAKE: dict[str, Make] = {
    "all": lambda n: optimizers.SGD(0.2, parameters=[*n.values()], grad_clip=Clip(0.3)),
    "a clip of the script's": lambda n: optimizers.SGD(
        0.2, parameters=[*n.values()], grad_clip=EachByItself(0.1)
    ),
    "no clip": lambda n: optimizers.Lamb(0.1, parameters=[*n.values()]),
    "first frozen": lambda n: optimizers.AdamW(
        0.05, parameters=frozen(n, "0", "2"), grad_clip=Clip(0.05)
    ),
    "last frozen": lambda n: optimizers.Lamb(0.05, parameters=frozen(n, "4", "6")),
    "head alone": lambda n: optimizers.Momentum(
        0.1, parameters=part(n, "6"), weight_decay=0.1, grad_clip=Clip(0.05)
    ),
    "a generator": lambda n: optimizers.Adagrad(0.1, parameters=iter(part(n, "6"))),
    "left out": lambda n: optimizers.SGD(
        0.5, parameters=two_groups(n, False, HALF, TENTH), grad_clip=Clip(0.1)
    ),
    "left out, several at once": lambda n: optimizers.Momentum(
        0.5, parameters=two_groups(n, False, HALF, TENTH), use_multi_tensor=True
    ),
    "own clips": lambda n: optimizers.Adam(
        0.05, parameters=two_groups(n, False, {"grad_clip": Clip(0.01)}, {"grad_clip": Clip(0.1)})
    ),
    "empty": lambda n: optimizers.Momentum(
        0.5, parameters=two_groups(n, True, {}, {}), weight_decay=0.1, grad_clip=Clip(0.1)
    ),
    "a group of one rank": lambda n: optimizers.AdamW(
        0.05,
        parameters=[
            {"params": parameters, "learning_rate": 0.5, "grad_clip": clip}
            for parameters, clip in ((part(n, "4", "6"), nn.ClipGradByNorm(0.1)),)
            if parameters
        ],
    ),
    "weights": lambda n: optimizers.SGD(0.2, parameters=[{"params": part(n, "0.w", "4.w")}]),
}


def replaced(optimizer: Any, _: Named) -> None:
    optimizer._grad_clip = Clip(0.02)


def grouped(optimizer: Any, named: Named) -> None:
    biases = {"params": part(named, "0.b", "2", "4.b"), "grad_clip": Clip(0.02)}
    optimizer._add_param_group(biases)


def narrowed(optimizer: Any, _: Named) -> None:
    optimizer.narrowed.clip_norm = 0.02


def with_own_clip(named: Named) -> Any:
    clip = Clip(0.3)
    made = optimizers.SGD(0.2, parameters=[*named.values()], grad_clip=clip)
    made.narrowed = clip
    return made


MAKE["its clip"] = with_own_clip
#: What is made, what is done to it before the second step, and how it is stepped.
SITUATIONS: list[tuple[str, Callable[[Any, Named], None] | None, str]] = [
    *((name, None, "train_batch") for name in MAKE),
    *((name, None, "step") for name in ("first frozen", "head alone", "left out", "own clips")),
    ("last frozen", None, "minimize"),
    ("first frozen", None, "scaler"),
    ("all", replaced, "train_batch"),
    ("all", replaced, "step"),
    ("no clip", replaced, "train_batch"),
    ("weights", grouped, "train_batch"),
    ("its clip", narrowed, "train_batch"),
]


def trained(situation: tuple[str, Any, str]) -> float:
    """Trains three batches in the job that runs; returns how far parameters are from plain ones."""
    made, later, stepped = situation
    paddle.seed(7)
    descriptions = mlp_layers()
    model = pipeline(descriptions)
    plain_layers = {
        str(n): one.build_layer() for n, one in enumerate(descriptions) if not callable(one)
    }
    plain = {f"{i}.{n}": p for i, one in plain_layers.items() for n, p in one.named_parameters()}
    named = dict(model.layers.named_parameters())
    for name, parameter in plain.items():
        parameter.set_value(paddle.randn(parameter.shape) * 0.4)
        if name in named:
            named[name].set_value(parameter)

    def forward(value: Any) -> Any:
        for number in range(7):
            layer = plain_layers.get(str(number))
            value = nn.functional.tanh(value) if layer is None else layer(value)
        return value

    single, optimizer = MAKE[made](plain), fleet.distributed_optimizer(MAKE[made](named))
    scaler = fleet.distributed_scaler(paddle.amp.GradScaler())
    for step in range(3):
        if step == 1 and later is not None:
            later(single, plain)
            later(optimizer, named)
        data = batch(seed=step)
        for begin in range(0, 4 * ROWS, ROWS):
            inputs, labels = (tensor[begin : begin + ROWS] for tensor in data)
            (nn.functional.cross_entropy(forward(inputs), labels) * 0.25).backward()
        single.step()
        single.clear_grad()
        if stepped in ("train_batch", "scaler"):
            model.train_batch(data, optimizer, scaler=scaler if stepped == "scaler" else None)
            continue
        loss = model.forward_backward_pipeline(data)
        optimizer.step() if stepped == "step" else optimizer.minimize(loss)
        optimizer.clear_grad()
    return max(float((named[name] - plain[name]).abs().max()) for name in named)


def refusals(model: Any) -> list[str]:
    """What an optimizer over nothing of any rank, none at all, and a clip by a norm are told."""
    told = []
    for wrong in ([], None, model.parameters()):
        try:
            clip = Halved(0.1) if wrong else None
            optimizer = None if wrong is None else optimizers.SGD(0.1, wrong, grad_clip=clip)
            model.train_batch(batch(), fleet.distributed_optimizer(optimizer))
        except FleetPipeError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def on_one_of_two_ranks() -> tuple[list[float], list[str]]:
    """What a rank does."""
    with job(2, allow=["clip:EachByItself"]):
        apart = [trained(situation) for situation in SITUATIONS]
        return apart, refusals(pipeline())


def test_ranks_with_less_to_train_step_as_one_device(on_ranks: Any) -> None:
    for apart, told in on_ranks(on_one_of_two_ranks, 2):
        assert dict(zip(map(str, SITUATIONS), apart)) == dict.fromkeys(map(str, SITUATIONS), 0.0)
        wrong, none, own_clip = told
        assert "'allow': ['clip:Halved']" in own_clip
        assert "ConfigError: the optimizer was built on the wrong parameters" in wrong
        assert "parameters=[]" in none


#: Optimizers with an option that differs on ranks, by rank and parameters.
OPTIONS: dict[str, Callable[[int, Any], Any]] = {
    "beta1": lambda rank, own: optimizers.Adam(0.1, beta1=0.9 - rank / 10, parameters=own),
    "weight_decay": lambda rank, own: optimizers.AdamW(
        0.1, weight_decay=rank / 10, parameters=[{"params": own}]
    ),
    "regularization": lambda rank, own: optimizers.SGD(0.1, own, weight_decay=0.1 + rank / 10),
}


def train_with_own_option(option: str) -> None:
    with job(2):
        model = pipeline()
        optimizer = OPTIONS[option](fleet.worker_index(), model.parameters())
        model.train_batch(batch(), fleet.distributed_optimizer(optimizer))


@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_whose_optimizers_have_other_options_are_refused(on_ranks: Any, option: str) -> None:
    with pytest.raises(JobFailed) as failed:
        on_ranks(train_with_own_option, 2, option)
    assert f"as on rank 0: {option} of the optimizer = " in str(failed.value)


def test_one_process_has_paddles_constructors_and_clips_of_a_script() -> None:
    with job(2):
        optimizer = optimizers.SGD(0.1, pipeline().parameters(), grad_clip=Halved(0.1))
        fleet.distributed_optimizer(optimizer)
        assert type(optimizer._grad_clip) is Halved
    with pytest.raises(IndexError):
        optimizers.Momentum(0.1, parameters=[])
    with job(2), pytest.raises(ConfigError, match="wrong parameters"):
        pipeline().train_batch(
            batch(), fleet.distributed_optimizer(optimizers.SGD(0.1, parameters=[]))
        )

"""A model of ColossalAI's from exec_seq to its stages: read, made without memory, cut, filled.

Figures of the policies are those that ColossalAI's own code gives.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle import nn

from fleetpipe.contrib.compat.colossalai import ParallelMode, PipelinableContext, gpc
from fleetpipe.contrib.compat.colossalai.pipeline import LayerCall, read_sequence
from fleetpipe.contrib.compat.colossalai.pipeline.pipelinable import boundaries
from fleetpipe.errors import ConfigError, PartitionError, StateError
from tests.contrib.compat.colossalai.test_engine import (
    EXEC_SEQ,
    NAMES,
    ResNet,
    batch,
    launched,
    partitioned,
    recorded,
)
from tests.pipelines import bits


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.blocks = nn.LayerList([nn.Linear(3, 3), nn.Tanh()])
        self.tail = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.again = self.head


def double(x: Any) -> Any:
    return x * 2


def halve(x: Any) -> Any:
    return x / 2


ALL = ["head", "blocks.0", "blocks.1", "tail"]


def test_a_sequence_names_layers_and_the_functions_around_them() -> None:
    model, flatten = Model(), nn.Flatten()
    # Without one children stand as they were made, and containers are opened.
    names = [step.name for step in read_sequence(model, None).steps]
    assert names == ["head", "blocks.0", "blocks.1", "tail.0", "tail.1"]
    around = [double, "head", halve, (double, "behind"), (halve, "front"), (double, "front")]
    steps = read_sequence(model, [*around, *ALL[1:], flatten]).steps
    assert (steps[0].call.front, steps[0].call.behind) == ((double,), (halve, double))
    assert (steps[1].call.front, steps[1].call.behind) == ((halve, double), ())
    # A layer without parameters may stand as a function.
    assert steps[-1].call.behind == (flatten,)
    # A second name of a layer is known.
    assert read_sequence(model, [*ALL, "again"]).steps[-1].layer is model.head
    marked = ["head", "SPLIT_NODE", double, *ALL[1:3], "SPLIT_NODE", "tail"]
    found = read_sequence(model, marked)
    assert found.splits == (1, 3)
    assert found.steps[0].call.behind == (double,)


def test_a_sublayer_may_have_the_name_of_a_method_or_a_dot_in_it() -> None:
    model = nn.Layer()
    model.add_sublayer("blocks", nn.LayerDict({"eval": nn.Linear(2, 2)}))
    model.add_sublayer("a.b", nn.Linear(2, 2))
    steps = read_sequence(model, ["blocks.eval", "a.b"]).steps
    assert [step.layer for step in steps] == model.sublayers()[1:]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["haed", *ALL[1:]], "did you mean 'head'"),
        ([*ALL, (double, "front")], "ends with a function that stands in front of nothing: double"),
        ([(double, "behind"), *ALL], "begins with a function that stands behind nothing"),
        (["head", "blocks", "tail"], "'blocks', which cannot be called"),
        (["head", "tail"], "nothing for blocks.0"),
        ([*ALL, 3], "neither the name of a sublayer nor a function"),
        ([*ALL, (double, "after")], "neither the name of a sublayer nor a function"),
        ([*ALL, nn.ReLU], "neither the name of a sublayer nor a function"),
        ([*ALL, nn.Linear(2, 2)], "a layer with parameters"),
        ([double], "ends with a function"),
        ([], "names no layer"),
    ],
)
def test_what_cannot_stand_in_a_sequence_is_refused(entries: list[Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sequence(Model(), entries)
    assert words in str(caught.value).replace("\n  got", "")


def test_a_parameter_of_the_model_itself_is_missed() -> None:
    model = Model()
    model.scale = paddle.create_parameter([1], "float32")
    with pytest.raises(ConfigError, match="nothing for scale"):
        read_sequence(model, ALL)


def test_functions_on_both_sides_of_a_layer_run_and_a_tuple_is_several_arguments() -> None:
    call = LayerCall((lambda x, y: x + y,), (lambda x: (x * 10, x), lambda x, y: x + y))
    assert float(call(nn.Identity(), (paddle.ones([]), paddle.ones([])))) == 22


#: Of ResNet-50: conv1, bn1, relu, maxpool, layer1 to layer4, avgpool, fc with 1000 classes.
RESNET50 = [9408, 128, 0, 0, 215808, 1219584, 7098368, 14964736, 0, 2049000]


def cut(policy: Any, weights: list[int], ranks: int, chunks: int = 1, splits: Any = ()) -> Any:
    stages = list(pairwise(boundaries(policy, weights, splits, ranks, chunks)))
    return {rank: stages[rank::ranks] for rank in range(ranks)}


MAPPING = {0: [(0, 1), (3, 4)], 1: [(1, 3), (4, 6)]}


@pytest.mark.parametrize(
    ("policy", "weights", "ranks", "chunks", "splits", "expected"),
    [
        ("uniform", [1] * 10, 2, 1, (), {0: [(0, 5)], 1: [(5, 10)]}),
        ("uniform", [1] * 7, 3, 1, (), {0: [(0, 2)], 1: [(2, 4)], 2: [(4, 7)]}),
        # Cut into 4 stages at once it would be 2, 2, 3, 3.
        ("uniform", [1] * 10, 2, 2, (), {0: [(0, 2), (5, 7)], 1: [(2, 5), (7, 10)]}),
        ("balanced", RESNET50, 2, 1, (), {0: [(0, 7)], 1: [(7, 10)]}),
        ("customized", [1] * 5, 2, 1, (2,), {0: [(0, 2)], 1: [(2, 5)]}),
        ("customized", [1] * 5, 2, 2, (1, 2, 3), {0: [(0, 1), (2, 3)], 1: [(1, 2), (3, 5)]}),
        (MAPPING, [1] * 6, 2, 2, (), MAPPING),
    ],
)
def test_policies_cut_where_colossalai_does(
    policy: Any, weights: list[int], ranks: int, chunks: int, splits: Any, expected: Any
) -> None:
    assert cut(policy, weights, ranks, chunks, splits) == expected


def test_the_tutorials_own_example_of_chunks() -> None:
    # "device 1 has layer 1,2,9,10; device 2 has layer 3,4,11,12", counted from 1.
    parts = cut("uniform", [1] * 16, 4, 2)
    assert parts[0] == [(0, 2), (8, 10)]
    assert parts[1] == [(2, 4), (10, 12)]


@given(st.lists(st.integers(0, 50), min_size=4, max_size=9), st.integers(1, 4))
def test_balanced_is_as_light_as_any_cut(weights: list[int], ranks: int) -> None:
    counted = [max(weight, 1) for weight in weights]

    def heaviest(bounds: tuple[int, ...]) -> int:
        return max(sum(counted[a:b]) for a, b in pairwise(bounds))

    every = combinations(range(1, len(weights)), ranks - 1)
    best = min(heaviest((0, *inner, len(weights))) for inner in every)
    assert heaviest(tuple(boundaries("balanced", weights, (), ranks, 1))) == best


@pytest.mark.parametrize(
    ("policy", "chunks", "splits", "words"),
    [
        ("uniform", 4, (), "cannot cut 6 layers into 4 equal chunks"),
        ("balanced", 1, (3,), "the policy is not 'customized'"),
        ({0: [(0, 3)]}, 1, (), "does not give each rank its chunks"),
        ({0: [(0, 3)], 1: [(3, 6)], 2: [(6, 6)]}, 1, (), "does not give each rank its chunks"),
        ({0: [(0, 3)], 1: [(4, 6)]}, 1, (), "begins with layer 3"),
        ({0: [(0, 3)], 1: [(2, 6)]}, 1, (), "begins with layer 3"),
        ("balanced", 4, (), "6 layers cannot fill 8 stages"),
    ],
)
def test_what_is_no_cut_is_refused(policy: Any, chunks: int, splits: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        cut(policy, [1] * 6, 2, chunks, splits)


class Tied(nn.Layer):
    """An embedding, a layer that runs twice, and a head that has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.twice = nn.Linear(3, 3)
        self.act = nn.Tanh()
        self.head = Head(self.embed.weight)

    def forward(self, x: Any) -> Any:
        return self.head(self.twice(self.act(self.twice(self.embed(x)))))


class Head(nn.Layer):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.weight, transpose_y=True)


def test_nothing_has_memory_before_it_is_cut_and_no_random_number_is_used() -> None:
    paddle.seed(7)
    expected = paddle.rand([4]).numpy().tobytes()
    paddle.seed(7)
    pipelinable = PipelinableContext()
    with pipelinable:
        model = ResNet()
        paddle.rand([2])
    assert paddle.rand([4]).numpy().tobytes() == expected
    assert not any(parameter._is_initialized() for parameter in model.parameters())
    pipelinable.to_layer_list(EXEC_SEQ)
    built = pipelinable.partition(1, 1, 0)
    assert not any(parameter._is_initialized() for parameter in model.parameters())
    assert all(parameter._is_initialized() for parameter in built.parameters())
    # Names as the plain model has them, by which optimizers find their state.
    assert [p.name for p in built.parameters()] == [p.name for p in model.parameters()]


def test_the_cut_model_is_the_plain_one_under_its_keys() -> None:
    plain = ResNet()
    built = recorded().partition(1, 2, 0)
    built.load_from(plain)
    assert built.segment_parts == [0, 7, 10]
    assert list(built.state_dict()) == list(plain.state_dict())
    assert bits(built.state_dict()) == bits(plain.state_dict()) == bits(built.full_state_dict())
    built.eval()
    plain.eval()
    image = batch(0)[0]
    assert built(image).numpy().tobytes() == plain(image).numpy().tobytes()


def test_weights_are_found_by_name_where_the_order_is_another() -> None:
    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(3, 3)
            self.first = nn.Linear(3, 3)

    built = recorded(Model, ["first", "second"]).partition(1, 2, 0)
    plain = Model()
    built.load_from(plain)
    assert bits(built.state_dict()) == bits(plain.state_dict())
    other = Model()
    built.copy_to(other)
    assert bits(other.state_dict()) == bits(plain.state_dict())


def test_a_state_dict_goes_in_and_tells_what_is_missing() -> None:
    built, plain = recorded().partition(1, 2, 0), ResNet()
    state = plain.state_dict()
    assert built.set_state_dict(state) == ([], [])
    assert bits(built.state_dict()) == bits(state)
    given = {name: value for name, value in state.items() if name != "conv1.weight"}
    with pytest.warns(UserWarning, match="not found"):
        assert built.set_state_dict({**given, "no": 1}) == (["conv1.weight"], ["no"])


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_first_values_depend_neither_on_the_cut_nor_on_the_seed(chunks: int) -> None:
    paddle.seed(1)
    whole = bits(recorded().partition(1, 1, 0).state_dict())
    paddle.seed(2)
    assert bits(recorded().partition(chunks, 2, 0).state_dict()) == whole


def test_layers_that_share_a_weight_are_tied() -> None:
    sequence = ["embed", "twice", "act", "twice", "head"]
    built = recorded(Tied, sequence).partition(1, 5, 0)
    assert built.segment_parts == [0, 1, 2, 3, 4, 5]
    assert len(built.parameters()) == 3
    assert list(built.state_dict()) == list(Tied().state_dict())
    assert built.state_dict()["head.weight"] is built.state_dict()["embed.weight"]
    plain = Tied()
    built.load_from(plain)
    words = paddle.to_tensor([[0, 3, 4]])
    assert built(words).numpy().tobytes() == plain(words).numpy().tobytes()


def test_a_weight_under_two_names_cannot_be_tied() -> None:
    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.other = Head(self.one.bias)

    with pytest.raises(ConfigError, match=r"one\.bias and other\.weight"):
        recorded(Model, ["one", "other"]).partition(1, 2, 0)


def test_a_layer_that_was_replaced_is_forgotten() -> None:
    def made() -> Any:
        model = ResNet()
        model.fc = nn.Linear(64, 3)
        return model

    assert recorded(made).partition(1, 1, 0).state_dict()["fc.weight"].shape == [64, 3]


def test_values_that_a_constructor_sets_are_kept() -> None:
    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.bias.set_value(paddle.full([2], 3.0))

    class Outer(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

    built = recorded(Outer, ["inner"]).partition(1, 1, 0)
    assert built.state_dict()["inner.bias"].tolist() == [3.0, 3.0]


def test_a_constructor_that_computes_with_parameters_is_refused() -> None:
    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.sum = self.inner.weight.sum()

    with pytest.raises(ConfigError, match="a constructor computes with parameters"):
        recorded(Model)


def test_one_model_is_made_at_a_time() -> None:
    with pytest.raises(ConfigError, match="no model was made"), PipelinableContext():
        nn.CrossEntropyLoss()
    with pytest.raises(ConfigError, match="makes one model") as caught, PipelinableContext():
        kept = (nn.Linear(2, 2), nn.Conv2D(1, 1, 1), nn.ReLU())
    assert "Linear, Conv2D" in str(caught.value)
    assert kept


def test_what_comes_too_early_is_refused() -> None:
    pipelinable = PipelinableContext()
    with pytest.raises(StateError, match="no model to list"):
        pipelinable.to_layer_list(NAMES)
    with pytest.raises(StateError, match="not in order yet"):
        pipelinable.partition(1, 2, 0)


def test_partition_is_for_this_process() -> None:
    with pytest.raises(ConfigError, match="got: rank 2"):
        recorded().partition(1, 2, 2)


def test_chunks_switch_the_schedule_and_are_the_whole_model_in_order() -> None:
    with launched(NUM_CHUNKS=2):
        pipelinable = recorded()
        model = partitioned(pipelinable, gpc.config.NUM_CHUNKS)
        bounds = model.segment_parts
        assert [len(chunk) for chunk in model.get_model_chunks()] == [
            end - start for start, end in pairwise(bounds)
        ]
        assert (bounds[0], bounds[-1], len(bounds)) == (0, 10, 5)
        for other in (1, 3):
            with pytest.raises(ConfigError, match=rf"NUM_CHUNKS=2 .*\n.*partition\({other}, "):
                partitioned(pipelinable, other)


def test_a_policy_that_cannot_cut_is_refused_before_anything_is_built() -> None:
    pipelinable = recorded(policy="uniform")
    with pytest.raises(PartitionError, match="10 layers into 3 equal chunks"):
        pipelinable.partition(3, 2, 0)
    pipelinable.policy = "balance"
    with pytest.raises(PartitionError, match="did you mean 'balanced'"):
        pipelinable.partition(1, 2, 0)
    pipelinable.policy = {0: [(0, 4)], 1: [(4, 9)]}
    with pytest.raises(PartitionError, match="end at layer 9, the model at layer 10"):
        pipelinable.partition(1, 2, 0)
    pipelinable.policy = {0: [(0, 4)], 1: [(4, 10)]}
    assert pipelinable.partition(1, 2, 0).segment_parts == [0, 4, 10]


def test_gpc_knows_its_place() -> None:
    with launched():
        assert gpc.pipeline_parallel_size == 2
        assert gpc.get_world_size(ParallelMode.GLOBAL) == 2
        assert gpc.data_parallel_size == 1
        for mode in (ParallelMode.PIPELINE, ParallelMode.DATA):
            assert gpc.is_first_rank(mode)
            assert gpc.is_last_rank(mode)
    with pytest.raises(StateError, match="no job yet"):
        gpc.get_local_rank(ParallelMode.GLOBAL)
    with pytest.raises(StateError, match="was not launched"):
        print(gpc.config)

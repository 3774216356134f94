"""A model that is made without memory, cut, and filled where it runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.contrib.compat.colossalai import ParallelMode, PipelinableContext, gpc
from fleetpipe.errors import ConfigError, PartitionError, StateError
from tests.contrib.compat.colossalai.programs import (
    EXEC_SEQ,
    NAMES,
    ResNet,
    batch,
    launched,
    partitioned,
    recorded,
)
from tests.pipelines import bits


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


def test_the_list_of_the_tutorial() -> None:
    pipelinable = recorded()
    assert pipelinable.partition(1, 2, 0).segment_parts == [0, 7, 10]


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

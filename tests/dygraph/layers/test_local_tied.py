"""``LocalSharedLayerDesc``: weights that the layers of one rank share, handed to constructors."""

from __future__ import annotations

import re
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import (
    LayerDesc,
    LocalSharedLayerDesc,
    PipelineLayer,
    SharedLayerDesc,
)
from tests.dygraph import tied
from tests.dygraph.models import MODELS, VOCABULARY, WIDTH, FeedForward
from tests.pipelines import adam, job, model_in_job, pipeline, train

#: The fully qualified name of the weight that the entries below share.
TIED = "local_shared_layers.embed.table.weight"


class Head(nn.Layer):
    """A head that takes the embedding's weight, and keeps it under a name of its own."""

    def __init__(self, embedding_weight: Any = None) -> None:
        super().__init__()
        self.rows = embedding_weight
        if embedding_weight is None:
            self.rows = self.create_parameter([VOCABULARY, WIDTH])
        self.bias = self.create_parameter([VOCABULARY], is_bias=True)

    @property
    def embedding_weight(self) -> Any:
        """The tied weight, for ``SharedLayerDesc``."""
        return self.rows

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.rows, transpose_y=True) + self.bias


def entries(kind: Any = LocalSharedLayerDesc, last: Any = Head) -> list[Any]:
    """An embedding, two blocks, and a head that shares the embedding's weight."""
    return [
        kind("embed", tied.Tokens, None, "embedding_weight"),
        LayerDesc(FeedForward),
        LayerDesc(FeedForward),
        kind("embed", last, None, "embedding_weight"),
    ]


def test_the_names_are_fleets_and_the_weight_is_one() -> None:
    layers = PipelineLayer(entries(), num_stages=1)
    embed, *_, head = layers.run_function
    assert head.rows is embed.table.weight
    assert list(layers.local_shared_layers) == ["embed"]
    names = list(layers.state_dict())
    assert names[:2] == ["local_shared_layers.embed.scale", TIED]
    assert "3.rows" in names
    assert [slot.name for slot in layers.state.slots()].count(TIED) == 1
    assert len(layers.parameters()) == len(names) - 1
    single = layers.single_model()
    assert single._functions[-1].rows is single._functions[0].table.weight


def test_one_stage_has_the_bits_of_the_single_model() -> None:
    with model_in_job(1, 4, layers=entries(), loss_fn=tied.loss) as pipe:
        session = parity.begin(pipe, adam(pipe))
        for step in range(3):
            session.step(MODELS["gpt"].batch(4, step))
    assert session.report.passed, session.report.verdict()
    assert session.report.differences == []


@pytest.mark.parametrize("schedule", ["DualPipeV", "ZBV"])
def test_two_chunks_of_a_rank_share_as_shared_layers_do(schedule: str) -> None:
    local, shared = (
        train(
            *(entries(kind), 2, schedule),
            steps=3,
            data=MODELS["gpt"].batch,
            optimizer=adam,
            loss_fn=tied.loss,
        )
        for kind in (LocalSharedLayerDesc, SharedLayerDesc)
    )
    assert local.losses == shared.losses
    assert [*local.state.values()] == [*shared.state.values()]


def test_only_the_order_in_which_uses_are_added_differs_from_the_single_model() -> None:
    with model_in_job(2, 4, "DualPipeV", layers=entries(), loss_fn=tied.loss) as pipe:
        session = parity.begin(pipe, adam(pipe, epsilon=1e-4))
        session.step(MODELS["gpt"].batch(4, 0))
    assert session.report.passed, session.report.verdict()
    assert {found.name for found in session.report.differences} <= {"", TIED}


def test_entries_of_one_class_are_layers_of_their_own() -> None:
    one, two = (LocalSharedLayerDesc("head", Head, None, "rows") for _ in range(2))
    with pytest.raises(ConfigError, match=r"the weights \['rows'\][\s\S]*take the weights"):
        PipelineLayer([one, two], num_stages=1)
    one, two = (LocalSharedLayerDesc("head", Head, None, "embedding_weight") for _ in range(2))
    first, second = PipelineLayer([one, nn.functional.relu, two], num_stages=1).run_function[::2]
    assert first.rows is second.rows
    assert first.bias is not second.bias


def test_a_forward_func_is_called_with_its_own_layer() -> None:
    def doubled(layer: Any, x: Any) -> Any:
        return layer(x) * 2

    whole = entries()
    whole[-1] = LocalSharedLayerDesc("embed", Head, doubled, "embedding_weight")
    ids, _ = MODELS["gpt"].batch(1, 0)
    plain, twice = (PipelineLayer(e, num_stages=1)(ids) for e in (entries(), whole))
    assert (plain * 2).numpy().tobytes() == twice.numpy().tobytes()


class Forgetful(Head):
    """Takes the weight and does nothing with it."""

    def __init__(self, embedding_weight: Any = None) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("layers", "schedule", "message"),
    [
        (entries(), "1F1B", r"within one rank[\s\S]*layers 0 and 3[\s\S]*'embed'[\s\S]*0 and 1"),
        (entries(last=Forgetful), "DualPipeV", r"does not keep[\s\S]*\['embedding_weight'\]"),
        (entries(last=FeedForward), "DualPipeV", r"unexpected keyword[\s\S]*use SharedLayerDesc"),
        (
            [LocalSharedLayerDesc("k", nn.Linear, None, "table", 2, 2)] * 2,
            "1F1B",
            "no parameter 'table'",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_by_its_place(
    layers: list[Any], schedule: str, message: str
) -> None:
    with job(2, 4, schedule), pytest.raises(ConfigError, match=re.compile(message)):
        pipeline(layers, loss_fn=tied.loss)

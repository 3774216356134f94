"""Stages that pass a list which grows, as residuals of attention between blocks do."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import CLASSES, FEATURES, train, train_plainly


class First(nn.Linear):
    def forward(self, value: Any) -> Any:
        return {"hidden": super().forward(value), "blocks": []}


class Block(nn.Layer):
    """Attends over what all blocks before it have added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.score = self.create_parameter([8])

    def forward(self, state: Any) -> Any:
        added = paddle.tanh(self.linear(state["hidden"])) + state["hidden"]
        blocks = [*state["blocks"], added]
        values = paddle.stack(blocks)
        weights = nn.functional.softmax((values * self.score).sum(-1), axis=0)
        return {"hidden": (weights.unsqueeze(-1) * values).sum(0), "blocks": blocks}


class Last(nn.Linear):
    def forward(self, state: Any) -> Any:
        return super().forward(state["hidden"])


def layers() -> list[Any]:
    blocks = [LayerDesc(Block) for _ in range(4)]
    return [LayerDesc(First, FEATURES, 8), *blocks, LayerDesc(Last, 8, CLASSES)]


def test_a_list_that_grows_over_chunks_has_the_bits_of_the_plain_model() -> None:
    plain = train_plainly(layers=layers())
    chunks = {"num_virtual_pipeline_stages": 2, "seg_method": "layer:Block"}
    assert train(layers(), schedule="Interleaved1F1B", **chunks) == plain
    assert train(layers(), schedule="ZBH1") == plain

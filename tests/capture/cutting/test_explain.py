"""What a user reads of a capture."""

from __future__ import annotations

import time
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import log
from tests.capture.models import GPT, Encoded, UNet, tokens


def test_the_nodes_stand_in_order_with_what_crosses() -> None:
    found = fleetpipe.explain(UNet(), paddle.static.InputSpec([None, 3, 16, 16], "float32"))
    rows = str(found).splitlines()
    assert len(rows) == 1 + 22
    assert rows[0].split("  ")[0] == "node"
    # In the middle both skips cross, 2 x 4 x 16 x 16 and 2 x 8 x 8 x 8, and 2 x 8 x 4 x 4 itself.
    assert found.crossing[8] == 4 * (2048 + 1024 + 256)
    assert list(found.refused) == [12, 17]
    assert "before middle.0" in rows[9]
    assert "no: no call of a sublayer" in rows[13]
    assert sum(found.parameters) == sum(4 * tensor.size for tensor in UNet().state_dict().values())


def test_times_stand_there_where_they_are_measured() -> None:
    found = fleetpipe.explain(UNet(), paddle.randn([2, 3, 16, 16]), measure=True)
    assert found.costs is not None
    assert len(found.costs) == len(found.trace.nodes)
    assert "F ms" in str(found)


def test_it_says_why_a_layer_is_not_opened() -> None:
    text = str(fleetpipe.explain(Encoded(), (tokens(2), tokens(2))))
    assert "not opened: transformer.encoder.layers.1: it is one of Paddle's" in text
    model = GPT(2)
    kind = type(model.blocks[0])
    text = str(fleetpipe.explain(model, tokens(2), no_split=[kind]))
    assert "not opened: blocks.1: its class is in no_split" in text


@pytest.mark.parametrize("rows", [2, 3])
def test_the_picture_has_every_node_and_every_use(rows: int) -> None:
    found = fleetpipe.explain(UNet(), paddle.randn([rows, 3, 16, 16]))
    text = found.graphviz()
    assert text.count("[label=") == 22 + sum(len(node.uses) for node in found.trace.nodes) + 1
    assert f'n2 -> n17 [label="float32[{rows}, 4, 16, 16]"];' in text


def test_the_graph_of_a_pipeline_has_its_stages_and_the_bytes_that_cross() -> None:
    pipe = fleetpipe.pipeline(
        UNet(), paddle.randn([2, 3, 16, 16]), split_spec=["middle", "up2"], verify=False
    )
    text = pipe.graphviz()
    assert [text.count(colour) for colour in ("#8fc7e8", "#f5c56b", "#86d1b3")] == [8, 5, 9]
    # The outer skip goes to the last stage, which takes 8 KiB of the one before too.
    assert text.count("8,192 bytes") == 2
    assert text.count("4,096 bytes") == text.count("1,024 bytes") == 1
    assert text.count("#b00020") == 4


def test_a_capture_that_takes_long_says_so_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(nn.Layer):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            time.sleep(0.05)
            return x * 2

    monkeypatch.setattr(log, "_PATIENCE", 0.01)
    fleetpipe.explain(Slow(), paddle.ones([2, 3]))
    line = "capturing Slow: its forward runs in both modes, and on other numbers"
    assert caplog.messages.count(line) == 1

"""Paddle's plans on a layer of one process, and what parts of sequences do not run with."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional

from fleetpipe.contrib.sequences import (
    ContextParallel,
    PrepareContextParallel,
    SequenceRanks,
    context_parallel,
)
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import SoleGroup
from tests.contrib.sequences.test_attention import Fixed, plain
from tests.pipelines import job, pipeline


class Attention(nn.Layer):
    """Calls Paddle's function with some options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return functional.scaled_dot_product_attention(query, key, value, **self.options)


@pytest.mark.parametrize("causal", [False, True])
def test_alone_a_planned_layer_is_plain_attention(causal: bool) -> None:
    tensors = [paddle.rand([2, 6, 2, 8]) for _ in range(3)]
    layer = Attention(is_causal=causal)
    # Not the layer's: Paddle 2.6.2 has no kernel for it on CPU.
    expected = plain(*tensors, causal, None)
    stock = functional.scaled_dot_product_attention
    ContextParallel("all2all").apply(layer)
    assert np.allclose(layer(*tensors).numpy(), expected.numpy(), atol=1e-6)
    assert functional.scaled_dot_product_attention is stock


def test_a_prepared_layer_gets_this_ranks_places(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SequenceRanks(SoleGroup(), Fixed(2))
    monkeypatch.setattr(context_parallel, "sequence_ranks", lambda: ranks)
    layer = nn.Identity()
    PrepareContextParallel().apply(layer)
    assert layer(paddle.arange(8).unsqueeze(0)).tolist() == [[0, 1, 6, 7]]
    with pytest.raises(ConfigError, match="pad sequences to 8"):
        layer(paddle.zeros([1, 6]))
    other = nn.Identity()
    PrepareContextParallel("all2all").apply(other)
    with pytest.raises(ConfigError, match=r"(?s)along sep.*cp_degree=2"):
        other(paddle.zeros([1, 8]))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"attn_mask": paddle.zeros([6, 6])}, "no mask"), ({"dropout_p": 0.5}, "no dropout")],
)
def test_a_mask_and_a_dropout_are_refused(options: dict[str, Any], says: str) -> None:
    layer = Attention(**options)
    ContextParallel().apply(layer)
    with pytest.raises(ConfigError, match=says):
        layer(*[paddle.rand([2, 6, 2, 8])] * 3)


def test_what_calls_no_attention_is_refused() -> None:
    layer = nn.Linear(4, 4)
    ContextParallel().apply(layer)
    with pytest.raises(ConfigError, match="Linear does not attend"):
        layer(paddle.rand([2, 4]))
    with pytest.raises(ConfigError, match="'p2p' or 'all2all'"):
        ContextParallel("ring")


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a job believe that another rank has the rest of each sequence."""
    along = Job.along

    def of_two(self: Job, *axes: str) -> Any:
        return Fixed(2) if axes == ("sep", "cp") else along(self, *axes)

    monkeypatch.setattr(Job, "along", of_two)


def layers() -> list[Any]:
    return [nn.Linear(6, 5), nn.Linear(5, 4)]


@pytest.mark.usefixtures("split")
def test_sequence_chunks_are_refused_by_name() -> None:
    with (
        job(2, 4, "Seq1F1B", slices=2),
        pytest.raises(ConfigError, match=r"(?s)Seq1F1B cuts sequences.*sep_degree x cp_degree = 2"),
    ):
        pipeline(layers(), loss_fn=nn.CrossEntropyLoss())


@pytest.mark.usefixtures("split")
def test_undivided_losses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    delayed = Switches(delay_scale_loss=True)
    monkeypatch.setattr(Switches, "from_strategy", lambda *_: delayed)
    with job(2), pytest.raises(ConfigError, match="delay_scale_loss"):
        pipeline(layers(), loss_fn=nn.CrossEntropyLoss())

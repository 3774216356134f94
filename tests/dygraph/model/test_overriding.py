"""A subclass may override what ``nn.Layer`` tells of its state: nothing inside asks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import PipelineLayer
from tests.dygraph import tied
from tests.dygraph.models import MODELS
from tests.pipelines import bits, job


class Closed(PipelineLayer):
    """A pipeline whose own answers are nobody's business within fleetpipe."""

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        pytest.fail("state_dict was asked")

    def set_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        pytest.fail("set_state_dict was asked")

    def named_parameters(self, *_: Any, **__: Any) -> NoReturn:
        pytest.fail("named_parameters was asked")

    def parameters(self, *_: Any, **__: Any) -> NoReturn:
        pytest.fail("parameters was asked")


def trained(kind: type[PipelineLayer], folder: Path) -> tuple[Any, dict[str, bytes]]:
    """Trains a tied model for a batch, through everything that has to do with its state."""
    data = MODELS["gpt"].batch
    with job(2):
        topology = fleet.get_hybrid_communicate_group().topology()
        pipe = fleet.distributed_model(kind(tied.layers(), topology=topology, loss_fn=tied.loss))
        layer = pipe.layers
        inner = paddle.optimizer.AdamW(
            0.01,
            parameters=layer.trained_parameters(),
            grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
        )
        pipe.profile(data(4, 0))
        loss = pipe.train_batch(data(4, 0), fleet.distributed_optimizer(inner))
        layer._synchronize_shared_weights()
        layer.save_state_dict(folder)
        layer.set_state_dir(folder)
        single = layer.single_model()
        layer.copy_to(single)
        layer.load_from(single)
        return loss, bits(layer.full_state_dict())


def test_a_pipeline_that_renames_its_state_trains_with_the_bits_of_one_that_does_not(
    tmp_path: Path,
) -> None:
    loss, state = trained(Closed, tmp_path / "closed")
    expected, plain = trained(PipelineLayer, tmp_path / "plain")
    assert loss.numpy().tobytes() == expected.numpy().tobytes()
    assert state == plain

"""An unmodified model of ``paddle.vision``, fitted on two ranks: the bits of ``paddle.Model``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.static import InputSpec
from paddle.vision.models import LeNet

import fleetpipe
from fleetpipe.errors import ConfigError
from tests import pipelines
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, Losses, micro_batches

IMAGE = InputSpec([None, 1, 28, 28], "float32")


class Images(Digits):
    """The digits, 28 x 28 as LeNet wants them."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__(begin, end)
        large = np.kron(self.images.reshape(-1, 1, 8, 8), np.ones((3, 3), "float32"))
        self.images = np.pad(large, [(0, 0), (0, 0), (2, 2), (2, 2)])


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS):
        yield


def adam(parameters: Any) -> Any:
    return paddle.optimizer.Adam(0.001, parameters=parameters)


def test_an_unmodified_lenet_has_the_bits_of_paddles_model(tmp_path: Path) -> None:
    plain, network = LeNet(), LeNet()
    plain.set_state_dict(network.state_dict())
    model = fleetpipe.Model(network, [IMAGE])
    model.prepare(adam(model.parameters()), nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    assert {model.network.placement.stages} == {2}
    reference = paddle.Model(plain)
    criterion = nn.CrossEntropyLoss()
    reference.prepare(
        adam(plain.parameters()),
        lambda output, label: criterion(output, label) / STEPS,
        paddle.metric.Accuracy(),
    )
    data = Images(0, 3 * BATCH)
    ours, theirs = Losses(), Losses()
    options: Any = {"shuffle": False, "verbose": 0}
    model.fit(data, batch_size=BATCH, callbacks=ours, **options)
    reference.fit(micro_batches(data), accumulate_grad_batches=STEPS, callbacks=theirs, **options)
    ends = [logs["acc"] for logs in theirs.train[STEPS - 1 :: STEPS]]
    assert [logs["acc"] for logs in ours.train] == ends
    state = model.network.full_state_dict()
    assert list(state) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert np.array_equal(state[name].numpy(), tensor.numpy()), name
    # And paddle.Model reads what was saved.
    model.save(str(tmp_path / "lenet"))
    other = paddle.Model(LeNet())
    other.prepare(adam(other.parameters()), criterion, paddle.metric.Accuracy())
    other.load(str(tmp_path / "lenet"), reset_optimizer=True)
    test = Images(1000, 1045)
    theirs_result = other.evaluate(test, batch_size=BATCH, verbose=0)
    assert theirs_result["acc"] == model.evaluate(test, batch_size=BATCH, verbose=0)["acc"]
    model.load(str(tmp_path / "lenet"))
    model.save(str(tmp_path / "inference"), training=False)
    loaded = paddle.jit.load(str(tmp_path / "inference"))
    (expected,) = model.predict(test, batch_size=BATCH, stack_outputs=True, verbose=0)
    assert np.allclose(loaded(paddle.to_tensor(test.images)).numpy(), expected, atol=1e-5)


def test_a_first_batch_stands_for_a_specification() -> None:
    images = paddle.to_tensor(Images(0, ROWS).images)
    model = fleetpipe.Model(LeNet(), images, split_spec=["fc"])
    assert [*model.network.users.values()] == [(0,)] * 4 + [(1,)] * 6


def test_a_sequential_needs_no_inputs() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    before = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    state = fleetpipe.Model(network).network.full_state_dict()
    assert {name: (state[name].numpy() == before[name]).all() for name in before} == dict.fromkeys(
        state, True
    )
    network.register_forward_post_hook(lambda layer, inputs, output: 2 * output)
    for other in (network, nn.Sequential(("body", nn.Linear(4, 2)))):
        with pytest.raises(ConfigError, match="a Sequential is cut by a run of its forward"):
            fleetpipe.Model(other)


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="a LeNet is cut by a run of its forward"):
        fleetpipe.Model(LeNet())
    with pytest.raises(ConfigError, match="or any nn"):
        fleetpipe.Model(3)

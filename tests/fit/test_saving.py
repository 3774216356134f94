"""The files of ``Model.save``, beside those of ``paddle.Model`` and read by it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.dygraph.state.names import ModelState
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from tests import pipelines
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, layers

OPTIONS: Any = {"shuffle": False, "verbose": 0}


def adam(parameters: Any) -> Any:
    rate = paddle.optimizer.lr.StepDecay(0.01, step_size=2)
    return paddle.optimizer.AdamW(rate, parameters=parameters)


def pipeline(pp: int = 2, made: Callable[[], Any] = layers, inputs: Any = None) -> Any:
    """A prepared pipeline in a job of its own, which the next one ends."""
    fleet.shutdown()
    pipelines.begin(pp, STEPS, rows=ROWS)
    model = fleetpipe.Model(made(), inputs)
    model.prepare(adam(model.parameters()), nn.CrossEntropyLoss())
    return model


@pytest.fixture(autouse=True)
def end() -> Any:
    yield
    fleet.shutdown()


def fit(model: Any, batches: int, first: int = 0) -> Any:
    data = Digits(first * BATCH, (first + batches) * BATCH)
    model.fit(data, batch_size=BATCH, **OPTIONS)
    return [value.numpy() for value in model.network.full_state_dict().values()]


def test_the_files_are_those_of_paddles_model(tmp_path: Path) -> None:
    model = pipeline()
    with paddle.utils.unique_name.guard():
        network = model.network.single_model()
        model.network.copy_to(network)
        reference = paddle.Model(network)
        reference.prepare(adam(network.parameters()), nn.CrossEntropyLoss())
        reference.fit(Digits(0, 3 * BATCH), batch_size=BATCH, **OPTIONS)
        reference.save(str(tmp_path / "theirs"))
    fit(model, 3)
    model.save(str(tmp_path / "ours"))
    for ending in ("pdparams", "pdopt"):
        ours, theirs = (
            pickle.loads((tmp_path / f"{name}.{ending}").read_bytes())
            for name in ("ours", "theirs")
        )
        assert set(ours) == set(theirs)
        for name in ("StructuredToParameterName@@", "LR_Scheduler"):
            assert ours.pop(name, None) == theirs.pop(name, None)
        for name, array in theirs.items():
            assert np.allclose(ours[name], array, atol=1e-5), name


@pytest.mark.parametrize("pp", [1, 3])
def test_a_run_goes_on_from_the_files_on_another_layout(tmp_path: Path, pp: int) -> None:
    model = pipeline()
    fit(model, 3)
    model.save(str(tmp_path / "saved"))
    expected = fit(model, 2, first=3)
    model = pipeline(pp)
    model.load(str(tmp_path / "saved"))
    assert model.learning_rate == pytest.approx(0.001)
    assert all(map(np.array_equal, fit(model, 2, first=3), expected))


class Named(nn.Layer):
    """The same model as a class, with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 48), nn.Linear(48, 32)
        self.third = nn.Linear(32, 10)

    def forward(self, value: Any) -> Any:
        value = nn.functional.relu(self.second(nn.functional.relu(self.first(value))))
        return self.third(value)


def test_files_of_paddles_model_with_other_names_are_taken_by_their_order(tmp_path: Path) -> None:
    # Not the first of its kind in this process: Paddle has counted on.
    network = Named()
    theirs = paddle.Model(network)
    theirs.prepare(adam(network.parameters()), nn.CrossEntropyLoss())
    theirs.fit(Digits(0, 2 * BATCH), batch_size=BATCH, **OPTIONS)
    theirs.save(str(tmp_path / "theirs"))
    model = pipeline()
    model.load(str(tmp_path / "theirs"))
    model.save(str(tmp_path / "ours"))
    ours, other = (
        pickle.loads((tmp_path / f"{name}.pdopt").read_bytes()) for name in ("ours", "theirs")
    )
    for kind in ("moment1", "moment2", "beta1_pow"):
        mine = [array for name, array in sorted(ours.items()) if kind in name]
        assert len(mine) == 6
        assert all(
            map(np.array_equal, mine, [a for name, a in sorted(other.items()) if kind in name])
        )


def tied() -> list[Any]:
    def transposed(layer: Any, value: Any) -> Any:
        return value @ layer.weight.T

    return [
        SharedLayerDesc("tied", nn.Linear, None, "weight", 64, 64),
        LayerDesc(nn.Linear, 64, 64),
        SharedLayerDesc("tied", nn.Linear, transposed, "weight", 64, 64),
    ]


def test_a_tied_weight_is_saved_once(tmp_path: Path) -> None:
    model = pipeline(made=tied)
    fit(model, 1)
    model.save(str(tmp_path / "tied"))
    state = pickle.loads((tmp_path / "tied.pdopt").read_bytes())
    assert len([name for name in state if "moment1" in name]) == 4
    expected = fit(model, 1, first=1)
    model = pipeline(made=tied)
    model.load(str(tmp_path / "tied"))
    assert all(map(np.array_equal, fit(model, 1, first=1), expected))


def test_what_does_not_fit_is_refused_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pipeline()
    fit(model, 1)
    model.save(str(tmp_path / "saved"))
    saved = {name: value.numpy() for name, value in model.network.full_state_dict().items()}

    def wider() -> Any:
        return [*layers()[:-1], LayerDesc(nn.Linear, 32, 20)]

    model = pipeline(made=wider)
    before = {name: value.numpy() for name, value in model.network.full_state_dict().items()}
    with pytest.raises(CheckpointError, match=r"\[32, 20\]"):
        model.load(str(tmp_path / "saved"))
    gathered: list[Any] = []
    gather = ModelState.gather

    def gathering(state: ModelState) -> Any:
        gathered.append(state)
        return gather(state)

    monkeypatch.setattr(ModelState, "gather", gathering)
    with pytest.warns(UserWarning, match=r"4\.weight, 4\.bias"):
        model.load(str(tmp_path / "saved"), skip_mismatch=True)
    assert len(gathered) == 1
    for name, value in model.network.full_state_dict().items():
        expected = before if name.startswith("4.") else saved
        assert np.array_equal(value.numpy(), expected[name])
    with pytest.raises(CheckpointError, match="there is no"):
        model.load(str(tmp_path / "nothing"))
    model = pipeline()
    model.load(str(tmp_path / "saved"), reset_optimizer=True)
    assert not [name for name in model._optimizer.state_dict() if "moment" in name]


def test_a_model_for_inference(tmp_path: Path) -> None:
    model = pipeline(inputs=[paddle.static.InputSpec([None, 64], "float32")])
    fit(model, 1)
    model.save(str(tmp_path / "model"), training=False)
    data = Digits(0, 5)
    loaded = paddle.jit.load(str(tmp_path / "model"))
    (expected,) = model.predict(data, batch_size=5, stack_outputs=True, verbose=0)
    assert np.allclose(loaded(paddle.to_tensor(data.images)).numpy(), expected, atol=1e-6)
    with pytest.raises(ConfigError, match="InputSpec"):
        pipeline().save(str(tmp_path / "model"), training=False)

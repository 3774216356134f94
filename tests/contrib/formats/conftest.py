"""The checkpoint of a Trainer, for all tests of formats, and Paddle's loads without their pause."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.contrib.formats.trainer_files import step, trained, write_unified


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A trained model with the state of its optimizer."""
    model, adam = trained()
    step(model, adam)
    names = {parameter.name: name for name, parameter in model.named_parameters()}
    states = {}
    for key, value in adam.state_dict().items():
        parameter = next((name for name in names if key.startswith(name)), None)
        if parameter is not None:
            states[f"{names[parameter]}/{key[len(parameter) + 1 :]}"] = value.numpy()
    parameters = {name: value.numpy() for name, value in model.state_dict().items()}
    masters = {name: value.astype("float32") + 1 for name, value in parameters.items()}
    groups = {"model": parameters, "optimizer": states, "master_weights": masters}
    return write_unified(tmp_path / "unified-0", groups)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle's ``load_state_dict`` collects garbage: a second for each load of small files."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)

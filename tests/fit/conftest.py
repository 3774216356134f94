"""The model that most tests of this folder fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import fleetpipe
from tests import pipelines
from tests.fit.test_model import ROWS, STEPS, layers, prepared


@pytest.fixture
def model() -> Iterator[Any]:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS):
        yield prepared(fleetpipe.Model(layers()))

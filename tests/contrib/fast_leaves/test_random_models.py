"""Random models whose small leaves are fast too have the bits of plain Paddle, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fleetpipe.contrib import fast_leaves
from tests.dygraph.random_models import Case
from tests.dygraph.train.test_random_models import outcomes


@contextmanager
def small_leaves_too(case: Case) -> Iterator[None]:
    """Within it leaves are fast that are too small to gain time."""
    fewest = fast_leaves._LEAST_SIZE, fast_leaves._LEAST_COLUMNS
    if not case.is_real:
        fast_leaves._LEAST_SIZE = fast_leaves._LEAST_COLUMNS = 1
    try:
        yield
    finally:
        fast_leaves._LEAST_SIZE, fast_leaves._LEAST_COLUMNS = fewest


@pytest.mark.once_for("2", "3")
@pytest.mark.parametrize("number", range(4))
def test_a_random_model_has_the_bits_of_plain_paddle(number: int) -> None:
    with small_leaves_too(Case.of(number)):
        assert outcomes(number)["equal"] > 1

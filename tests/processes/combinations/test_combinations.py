"""Random models under pairs and triples of axes, beside plain Paddle on one device.

``python -m tests.processes.combinations.random_mixtures 0 100`` tries as many, and so does
``random_attention``, from 1000 on under every pair and triple of axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fleetpipe.paddle_api import VERSION
from tests.fixtures import Call
from tests.processes.combinations import random_attention, random_mixtures
from tests.processes.combinations.beside_plain import Case, every, wrong

pytestmark = pytest.mark.once


def cases(mixtures: Sequence[int], attention: Sequence[int]) -> list[Case]:
    """Those that this Paddle's topology has."""
    made = [random_mixtures.RandomCase(number) for number in mixtures]
    made += [random_attention.RandomCase(number) for number in attention]
    missing = {"ep", "cp"} if VERSION.startswith("2.") else set()
    return [case for case in made if not missing & case.degrees.keys()]


@pytest.mark.parametrize("case", cases((2, 45), (16, 32)), ids=lambda case: case.name)
def test_in_one_process(case: Case) -> None:
    assert not wrong(case, *every([case]))


def test_on_four_ranks(on_ranks: Call) -> None:
    # Of attention: split in every way, by plans too, and members of parts.
    chosen = cases((9, 26, 254), (4, 10, 13, 27, 51, 1037, 1049, 1077))
    for rank in on_ranks(every, 4, chosen, timeout=240):
        for case, gaps in zip(chosen, rank):
            assert not wrong(case, gaps), (case, gaps)

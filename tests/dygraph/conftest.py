"""Fixtures of the tests of dynamic graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetpipe.dygraph.tensor_parallel import groups
from tests.groups import MEMBERS, Twins


@pytest.fixture
def twins() -> Iterator[Twins]:
    """The group of MEMBERS, connected."""
    group = Twins()
    groups.connect(MEMBERS[0], group)
    yield group
    groups.disconnect(MEMBERS[0])

"""The Python blocks of the pages on two ranks, with what the page gives before them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT
from tests.test_docs import PAGES, run_blocks, skip_what_is_not_here

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_on_two_ranks(page: Path, on_ranks: Callable[..., list[Any]]) -> None:
    skip_what_is_not_here(page)
    on_ranks(run_blocks, 2, page, timeout=60)

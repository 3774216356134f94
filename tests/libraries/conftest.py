"""Real libraries, in an environment of their own: see ``make test-libraries``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks these tests, which other runs leave out, and skips them without the library."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.libraries)
            if find_spec("paddlenlp") is None:
                item.add_marker(pytest.mark.skip(reason="PaddleNLP is not installed"))

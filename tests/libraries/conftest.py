"""Real libraries, in environments of their own: see ``make test-libraries``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks these tests, which other runs leave out, and skips them without their library."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.libraries)
        formers = item.path.name.startswith("test_formers")
        name, title = ("paddleformers", "PaddleFormers") if formers else ("paddlenlp", "PaddleNLP")
        if find_spec(name) is None:
            item.add_marker(pytest.mark.skip(reason=f"{title} is not installed"))

"""Real libraries, in environments of their own: see ``make test-libraries``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: What either library is tested with.
OF_BOTH = ("test_preferences.py", "test_generation.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks these tests, which other runs leave out, and skips them without their library."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.libraries)
        names = ("paddlenlp", "paddleformers")
        if item.path.name.startswith("test_formers"):
            names = ("paddleformers",)
        elif item.path.name not in OF_BOTH:
            names = ("paddlenlp",)
        if not any(map(find_spec, names)):
            reason = f"{' or '.join(names)} is not installed"
            item.add_marker(pytest.mark.skip(reason=reason))

"""Tests of how the code is written: its words and its types."""

import pytest

pytestmark = pytest.mark.once

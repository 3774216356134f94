"""Several axes of ranks at once, beside one device."""

import pytest

pytestmark = pytest.mark.once

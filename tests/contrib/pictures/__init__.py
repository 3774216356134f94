"""Pictures of schedules and profiles."""

import pytest

pytestmark = pytest.mark.no_paddle

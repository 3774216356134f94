import pytest

pytestmark = pytest.mark.once

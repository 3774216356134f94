import pytest

pytestmark = pytest.mark.no_paddle

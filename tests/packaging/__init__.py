"""Tests of what users install, and the trial of a release."""

import pytest

pytestmark = pytest.mark.once

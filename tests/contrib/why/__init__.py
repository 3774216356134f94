"""Tests of ``fleetpipe.contrib.why``."""

import pytest

pytestmark = pytest.mark.no_paddle

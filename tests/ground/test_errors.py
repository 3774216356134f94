"""What is a whole number of at least so much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleetpipe.errors import ConfigError, require_whole


@pytest.mark.parametrize("value", [1, 4, np.int64(4)])
def test_whole_numbers_pass_as_such(value: Any) -> None:
    assert type(require_whole("size", value)) is int


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, -1, np.float32(1), np.bool_(True)])
def test_others_are_refused_with_what_they_are(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        require_whole("size", value, 0, where="here")
    summary, where, got, _ = str(caught.value).splitlines()
    assert summary == "size must be a whole number of at least 0"
    assert (where, got) == ("  where: here", f"  got: size={value!r}")

"""Automatic casts: made visible where there are none, they cast nothing."""

from __future__ import annotations

import paddle

from fleetpipe.paddle_api.amp import casts_automatically, casts_of_now, casts_visible


def test_casts_that_are_only_visible_cast_nothing() -> None:
    assert casts_of_now() is None
    with casts_visible("float16") as shown:
        assert shown is not None
        assert casts_of_now() == shown
        assert not casts_automatically()
        with paddle.amp.auto_cast(enable=False):
            assert casts_of_now() is None
        assert casts_of_now() == shown
    assert casts_of_now() is None

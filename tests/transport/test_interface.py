"""What `fleetpipe.transport` offers, with Paddle and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fleetpipe.transport


def test_the_interface_loads_no_paddle() -> None:
    program = (
        "import sys; from fleetpipe.transport import MessageKey, Transport, Value, describe; "
        "sys.exit('paddle' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    for name in fleetpipe.transport.__all__:
        assert getattr(fleetpipe.transport, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'rendezvous_point'"):
        _ = fleetpipe.transport.rendezvous_point

"""Which address and which interface of a host lead to the other ranks."""

from __future__ import annotations

import socket

import pytest

from fleetpipe import systems
from fleetpipe.errors import TransportError
from fleetpipe.job import paddle_groups
from fleetpipe.transport import hosts
from tests.fixtures import LogCapture, Patch

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def host(monkeypatch: Patch) -> None:
    """A host named to 127.0.1.1 that reaches 10.1.0.0/16 from 10.1.2.3, on eth7."""
    for name in ("PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS", "FLEETPIPE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    # monkeypatch puts back what the code under test sets.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(hosts, "named_address", lambda: "127.0.1.1")
    monkeypatch.setattr(
        hosts, "route_to", lambda name: "10.1.2.3" if name.startswith("10.1.") else "127.0.0.1"
    )
    interfaces = [("lo", "127.0.0.1"), ("eth7", "10.1.2.3")]
    monkeypatch.setattr(systems, "interfaces", lambda: interfaces)


def launched(monkeypatch: Patch, own: str, *others: str) -> None:
    """Sets what the launcher sets for a rank at the endpoint ``own``."""
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", own)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", ",".join([own, *others]))


ETH7, LOOPBACK = ("eth7", "10.1.2.3"), ("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("own", "other", "told", "address", "interface"),
    [
        ("10.1.2.3", "10.1.9.9", "", "10.1.2.3", ETH7),
        ("[fd00::1]", "[fd00::2]", "", "fd00::1", ("", "")),
        ("10.1.2.3", "10.1.9.9", "node7", "node7", ETH7),  # the user's comes first
        ("10.1.2.3", "10.1.9.9", "fd00::1", "fd00::1", ETH7),
        ("127.0.1.1", "10.1.9.9", "", "10.1.2.3", ETH7),  # no other host is told a loopback
        ("127.0.1.1", "127.0.1.1", "", "127.0.1.1", LOOPBACK),
        ("10.1.2.3", "10.1.2.3", "", "10.1.2.3", LOOPBACK),
    ],
)
def test_addresses_and_interfaces(
    monkeypatch: Patch, own: str, other: str, told: str, address: str, interface: tuple[str, str]
) -> None:
    launched(monkeypatch, f"{own}:6170", f"{other}:6171")
    monkeypatch.setenv("FLEETPIPE_ADDRESS", told)
    assert hosts.own_address() == address
    assert hosts.gloo_interface() == interface


def test_a_name_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(TransportError, match="set FLEETPIPE_ADDRESS"):
        hosts.own_address()
    assert hosts.gloo_interface() == ("", "")


def test_gloo_is_told_an_interface(monkeypatch: Patch, caplog: LogCapture) -> None:
    launched(monkeypatch, "10.1.2.3:6170", "10.1.9.9:6170")
    paddle_groups._choose_interface()
    assert paddle_groups.os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "the interface eth7 (10.1.2.3)" in caplog.text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    paddle_groups._choose_interface()
    assert paddle_groups.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_other_end_of_a_unix_socket_is_of_this_user(monkeypatch: Patch) -> None:
    listener = hosts.listen_unix()
    with listener.sock, hosts.dial(listener.address) as dialled:
        accepted, _ = listener.sock.accept()
        with accepted:
            assert not systems.is_other_user(accepted)
            monkeypatch.setattr(systems.os, "geteuid", lambda: 12345)
            assert systems.is_other_user(accepted)
            assert systems.is_other_user(dialled)
        with pytest.raises(PermissionError, match="another user"):
            hosts.dial(listener.address)


def test_what_the_kernel_says(monkeypatch: Patch) -> None:
    monkeypatch.undo()
    assert ("lo", "127.0.0.1") in systems.interfaces()
    assert {name for name, _ in systems.interfaces()} <= {n for _, n in socket.if_nameindex()}
    assert hosts.route_to("127.0.0.1") == "127.0.0.1"
    assert hosts.route_to("no-such-host.invalid") == ""


def test_what_a_cut_cable_lost_is_sent_again_each_second() -> None:
    listener = hosts.listen_tcp("127.0.0.1")
    dialled = hosts.dial(listener.address)
    with listener.sock, dialled:
        for sock in (listener.sock, dialled):
            try:
                longest = sock.getsockopt(socket.IPPROTO_TCP, 44)
            except OSError:
                pytest.skip("this kernel has no TCP_RTO_MAX_MS")
            assert longest == 1000
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 925_000

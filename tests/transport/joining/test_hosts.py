"""Which address and which interface of a host lead to the other ranks."""

from __future__ import annotations

import socket

import pytest

from fleetpipe import systems
from fleetpipe.errors import TransportError
from fleetpipe.job import paddle_groups
from fleetpipe.transport import hosts

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
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


def launched(monkeypatch: pytest.MonkeyPatch, own: str, *others: str) -> None:
    """Sets what the launcher sets for a rank at the endpoint ``own``."""
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", own)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", ",".join([own, *others]))


def test_the_launchers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, "10.1.2.3:6170", "10.1.9.9:6170")
    assert hosts.own_address() == "10.1.2.3"
    launched(monkeypatch, "[fd00::1]:6170", "[fd00::2]:6170")
    assert hosts.own_address() == "fd00::1"


def test_the_users_address_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, "10.1.2.3:6170")
    monkeypatch.setenv("FLEETPIPE_ADDRESS", "node7")
    assert hosts.own_address() == "node7"


def test_a_loopback_address_is_told_to_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, "127.0.1.1:6170", "10.1.9.9:6170")
    assert hosts.own_address() == "10.1.2.3"
    assert hosts.gloo_interface() == ("eth7", "10.1.2.3")


def test_one_host_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, "127.0.1.1:6170", "127.0.1.1:6171")
    assert hosts.own_address() == "127.0.1.1"
    launched(monkeypatch, "10.1.2.3:6170", "10.1.2.3:6171")
    assert hosts.gloo_interface() == ("lo", "127.0.0.1")


def test_gloo_has_an_interface_where_the_own_address_is_of_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched(monkeypatch, "10.1.2.3:6170", "10.1.9.9:6170")
    monkeypatch.setenv("FLEETPIPE_ADDRESS", "fd00::1")
    assert hosts.gloo_interface() == ("eth7", "10.1.2.3")


def test_a_name_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(TransportError, match="set FLEETPIPE_ADDRESS"):
        hosts.own_address()
    assert hosts.gloo_interface() == ("", "")


def test_gloo_is_told_an_interface_unless_the_user_did(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched(monkeypatch, "10.1.2.3:6170", "10.1.9.9:6170")
    paddle_groups._choose_interface()
    assert paddle_groups.os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "the interface eth7 (10.1.2.3)" in caplog.text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    paddle_groups._choose_interface()
    assert paddle_groups.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_other_end_of_a_unix_socket_is_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
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

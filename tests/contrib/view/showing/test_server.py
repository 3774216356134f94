"""The server: its pages, its token, and those who hold a connection and do nothing with it."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPResponse

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fleetpipe.cli import main
from fleetpipe.contrib.view import TOKEN, Address
from fleetpipe.contrib.view.board import PERIOD, JobBoard
from fleetpipe.contrib.view.history import History, HistoryRow
from fleetpipe.contrib.view.showing import server as module
from fleetpipe.contrib.view.showing.server import Server
from fleetpipe.contrib.view.watch_command import source_of
from fleetpipe.errors import ConfigError
from tests.contrib.view.job_records import board, running
from tests.fixtures import Patch

pytestmark = pytest.mark.no_paddle


@contextmanager
def served(address: str = "0", made: Callable[[], JobBoard] = board) -> Iterator[str]:
    server = Server(Address.parse(address), made)
    try:
        yield server.url
    finally:
        server.close()


def get(url: str, **headers: str) -> HTTPResponse:
    request = urllib.request.Request(url, headers=headers)
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=5)
    return answer


def refusal(url: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(url, **headers)
    raised.value.close()
    return raised.value.code


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    return socket.create_connection((host, int(port)), 5)


def test_its_pages() -> None:
    figures = {"loss": 0.125, "eval_loss": 0.5, "acc": 0.75, "step time": 0.25}
    shown = board(history=History([HistoryRow(2, figures)]))
    with served(made=lambda: shown) as url:
        page = get(url)
        text = page.read().decode()
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "&lt;last&gt;" in text
        titles = re.findall("<h3>(.*?)<", text)
        assert titles == ["loss", "acc", "step time"]
        assert "evaluation <b>0.5</b>" in text
        assert "loss 0.125; 0.5 in the evaluation after step 2" in text
        address = url.removeprefix("http://").rstrip("/")
        assert source_of(address)().history.rows() == shown.history.rows()
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert json.load(get(url + "status.json")).items() >= board().status().items()
        assert refusal(url + "etc/passwd") == 404
        request = urllib.request.Request(url, data=b"x")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=5)


def test_metrics_are_what_prometheus_reads() -> None:
    ranks = (replace(running().ranks[0], spent=(3.0, 0.0, 1.0)), board().ranks[1])
    with served(made=lambda: board(gradient_norm=math.nan, ranks=ranks)) as url:
        answer = get(url + "metrics")
        text = answer.read().decode()
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    read: Callable[[str], Iterator[Metric]] = text_string_to_metric_families
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in read(text)
        for sample in family.samples
    }
    assert samples["fleetpipe_steps_total",] == 11
    assert samples["fleetpipe_restarts_total",] == 2
    assert samples["fleetpipe_eta_seconds",] == 44.5
    assert samples["fleetpipe_rank_busy_ratio", "0"] == 0.75
    assert samples["fleetpipe_rank_state", "1", "stopped"] == 1
    assert samples["fleetpipe_slow_factor", "0", "compute"] == 1.5
    assert samples["fleetpipe_time_share_ratio", "data"] == 0.25
    assert math.isnan(samples["fleetpipe_gradient_norm",])


def test_elsewhere_a_token_is_needed(monkeypatch: Patch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert not Address.parse("127.0.0.1:80").token()
    assert len(Address.parse("0.0.0.0:80").token()) > 20
    assert Address.parse("[::1]:80") == ("::1", 80)
    monkeypatch.setenv(TOKEN, "+a/b&c#d%20=")
    with served() as url:
        assert get(url).status == 200
        assert source_of(url)().steps == 100
    monkeypatch.setenv(TOKEN, "secret")
    with served() as url:
        url, _, _ = url.partition("?")
        assert refusal(url) == 401
        assert refusal(url + "?token=other") == 403
        assert refusal(url + "metrics", Authorization="Bearer other") == 403
        assert get(url + "metrics", Authorization="Bearer secret").status == 200
        assert get(url + "status.json?token=secret").status == 200
        address = url.removeprefix("http://").rstrip("/")
        assert main(["watch", address, "--once", "--json"]) == 0
        assert main(["watch", f"{url}?token=other", "--once", "--json"]) == 2
        monkeypatch.setenv(TOKEN, "other")
        assert main(["watch", address, "--once", "--json"]) == 2


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("localhost:9100", 200),
        ("127.0.0.1", 200),
        ("[::1]:9100", 200),
        ("evil.example", 421),
        ("localhost.evil.example:9100", 421),
        ("", 421),
    ],
)
def test_a_name_of_another_host_is_not_answered(name: str, status: int, monkeypatch: Patch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with served() as url:
        if status == 200:
            assert get(url, Host=name).status == status
        else:
            assert refusal(url, Host=name) == status
    monkeypatch.setenv(TOKEN, "secret")
    with served() as url:
        assert get(url, Host=name, Authorization="Bearer secret").status == 200


@pytest.mark.parametrize("figures", [{"steps": sys.maxsize}, {"step_time": 1e100}, {"at": 1e18}])
def test_a_far_end_ends_no_page(figures: dict[str, float]) -> None:
    with served(made=lambda: board(**figures)) as url:
        assert b"remaining" in get(url).read()


def test_those_who_send_nothing_or_read_nothing_hold_up_nobody(
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    with served() as url, ExitStack() as ends:
        silent = [ends.enter_context(connected(url)) for _ in range(300)]
        silent[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        begin = time.monotonic()
        assert get(url + "status.json").status == 200
        assert time.monotonic() - begin < 30  # not 300 times the patience
        # Dropped: the first because more came than are kept, the last because it said nothing.
        for sock in (silent[0], silent[-2]):
            sock.settimeout(5)
            assert sock.recv(1) == b""


def test_many_requests_make_few_boards() -> None:
    made: list[float] = []

    def count() -> JobBoard:
        made.append(time.monotonic())
        return board()

    with served(made=count) as url:
        begin = time.monotonic()
        for _ in range(40):
            get(url + "metrics").close()
        assert len(made) <= 1 + (time.monotonic() - begin) / PERIOD


@pytest.mark.parametrize("text", ["", "x", "1:2:x", "70000", "-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="a port, or at HOST:PORT"):
        Address.parse(text)


def test_a_port_that_is_taken() -> None:
    with served() as url:
        port = url.rstrip("/").rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"cannot use 127.0.0.1:{port}"):
            Server(Address.parse(port), board)

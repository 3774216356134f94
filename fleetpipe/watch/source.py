"""Where a board is read: the folder of a run, or the address where a job is served."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fleetpipe.errors import ConfigError
from fleetpipe.watch.address import TOKEN, Address
from fleetpipe.watch.board import FILE, JobBoard, board_of, read_board

#: Gives the board as it is now.
Source = Callable[[], JobBoard]
_PATIENCE = 2.0
_LARGEST = 1 << 24


def source_of(text: str) -> Source:
    """Returns what reads the board of a job.

    Args:
        text: The folder of its run, HOST:PORT, or the address of its page.
    """
    folder = Path(text)
    if folder.is_dir():
        if not (folder / FILE).is_file():
            raise ConfigError(
                "nobody keeps the board of a job in this folder",
                expected=f"{FILE}, which a job writes while it runs",
                got=str(folder),
                fix="train with callbacks=MetricsLogger(folder), or give the HOST:PORT of --serve",
            )
        return lambda: read_board(folder / FILE).seen_at(time.time())
    if ":" not in text and not text.isdecimal():
        raise ConfigError(
            "there is no such folder, and this is no HOST:PORT",
            got=text,
            fix="give the folder of a run that has begun, or the HOST:PORT of --serve",
        )
    parts = urlsplit(text if "://" in text else f"//{text}")
    address = Address.parse(parts.netloc)
    token = parse_qs(parts.query).get("token", [os.environ.get(TOKEN, "")])[0]
    return lambda: _fetched(address, token)


def _fetched(address: Address, token: str) -> JobBoard:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        # A proxy of the environment is not for what is nearby.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"http://{address}/board.json", headers=headers)
        with opener.open(request, timeout=_PATIENCE) as answer:
            return board_of(answer.read(_LARGEST))
    except urllib.error.HTTPError as error:
        wrong = error.code in (401, 403)
        raise ConfigError(
            "the job is not shown to this user" if wrong else "this is no served job",
            got=f"{error.code} {error.reason} from {address}",
            fix=f"set {TOKEN}=TOKEN, as the job says where it begins"
            if wrong
            else "give the HOST:PORT of --serve",
        ) from error
    except (OSError, HTTPException) as error:
        raise ConfigError(
            f"no job is served at {address}",
            cause=str(getattr(error, "reason", error)).strip(),
            fix="start it with fleetpipe launch --serve PORT; on another host with HOST:PORT",
        ) from error

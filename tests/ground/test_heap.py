"""The heap keeps what tensors free, unless the user said otherwise."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from fleetpipe import systems
from tests.fixtures import Patch

pytestmark = pytest.mark.no_paddle

GLIBC = platform.libc_ver()[0] == "glibc"

#: Frees and takes 24 MiB twenty times, as the gradients of a stage do, and counts its page faults.
PROGRAM = """
import resource
from fleetpipe.systems import keep_freed_memory
keep_freed_memory()
def take():
    return [bytearray(4 * 2**20) for _ in range(6)]
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(**environment: str) -> int:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc, which alone is told")
def test_memory_is_taken_again_without_page_faults() -> None:
    pages = 20 * 24 * 2**20 // 4096
    assert _faults(FLEETPIPE_HEAP="0") > pages // 4
    assert _faults() < pages // 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEETPIPE_HEAP", "0"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
    ],
)
def test_the_users_own_setting_and_the_switch_are_respected(
    name: str, value: str, monkeypatch: Patch
) -> None:
    monkeypatch.setenv(name, value)
    assert not systems.keep_freed_memory()


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc, which alone is told")
def test_other_tunables_do_not_matter(monkeypatch: Patch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    assert systems.keep_freed_memory()

"""Runs tests as on a system that is not here: ``sitecustomize`` hides what that system lacks.

    export FLEETPIPE_TEST_SYSTEM=darwin PYTHONPATH=$PWD/tests/hidden_names:$PWD
    python -m pytest -m 'not libraries' tests

The systems are ``darwin``, ``win32`` (add ``and not processes``: it has no ranks) and
``no-boot-id``. Python loads ``sitecustomize`` before anything else, in the ranks of a job too.
"""

from __future__ import annotations

import os

SYSTEM = os.environ.get("FLEETPIPE_TEST_SYSTEM", "")
_UNIX = "unix-domain sockets join no ranks"
_MESH = "tests/transport/joining/test_connections.py::test_"
_USAGE = "tests/cli/test_cli_usage.py::test_"
_HOSTS = "tests/transport/joining/test_hosts.py::test_"
_NO_IDENTITY = {
    f"{_MESH}hosts_decide_between_unix": _UNIX,
    f"{_MESH}tcp_on_some_ranks_of_a_host": _UNIX,
    f"{_MESH}ten_thousand_strangers": "as quick as with unix-domain sockets TCP is not",
    f"{_MESH}host_identity_is": "the host has no identity",
}
_ANOTHER_KERNEL = {
    f"{_HOSTS}the_other_end_of_a_unix_socket": _UNIX,
    f"{_HOSTS}what_a_cut_cable_lost": "an option of Linux",
    "tests/ground/test_heap.py": "the heap is not glibc's",
    "tests/checkpoint/test_saving.py::test_a_copy_is_written_while": "threads have no nice value",
}
#: Tests of what a system does not have, by the begin of their ids.
DIFFERENT: dict[str, dict[str, str]] = {
    "no-boot-id": _NO_IDENTITY,
    "darwin": {**_NO_IDENTITY, **_ANOTHER_KERNEL},
    "win32": {
        **_NO_IDENTITY,
        **_ANOTHER_KERNEL,
        f"{_USAGE}every_argument_has_a_help_text[launch": "refused at once",
        f"{_USAGE}a_file_that_cannot_be_used": "fleetpipe launch is refused",
        f"{_USAGE}what_starts_another": "fleetpipe launch is refused",
        f"{_USAGE}processes_are_counted": "fleetpipe run is refused",
        "tests/cli/test_arguments.py::test_a_place_that_cannot": "fleetpipe run is refused",
        "tests/cli/test_arguments.py::test_a_file_to_write_is_tried": "there is no /dev/null",
        "tests/job/test_watch.py": "one process has no connections",
        "tests/job/test_job.py::test_the_end_of_a_job_tells": "one process has no connections",
        "tests/job/test_job.py::test_a_job_whose_failure": "one process has no connections",
        "tests/checkpoint/ranks/test_killed.py": "there are no ranks to kill",
        "tests/harness/test_launching.py::test_a_fork_waits": "there is no /proc",
        "tests/contrib/ray": "the supervisor and its ranks",
        "tests/contrib/kept_state": "the supervisor and its ranks",
        "tests/launch/supervisor": "the supervisor and its ranks",
        "tests/launch/test_resume.py": "the supervisor and its ranks",
        "tests/transport": "one process has no connections",
    },
}


def reason_to_skip(test: str) -> str:
    """Why a test cannot pass on the system; "" where it can."""
    found = DIFFERENT.get(SYSTEM, {}).items()
    return next((f"on {SYSTEM}: {why}" for start, why in found if test.startswith(start)), "")

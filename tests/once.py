"""Tests that say nothing about the version of Paddle: CI runs them on the newest version only.

``make test-262`` leaves them out (``-m 'not once'``), and the head of its output lists them. What
reads Paddle, or relies on its processes, stays: dynamic and static graph, capture, checkpoints,
Fleet's face, parity, the ranks of a job, and the code of the documentation's pages.
"""

from __future__ import annotations

#: By reason, files and folders below ``tests``. Everything under NO_PADDLE can be collected where
#: no Paddle is, which tests/ground/test_without_paddle.py checks.
NO_PADDLE = "imports no Paddle"
ONCE: dict[str, tuple[str, ...]] = {
    NO_PADDLE: (
        *("launch/supervisor", "partition", "profiling", "report/test_page.py"),
        *("report/test_run.py", "schedules/check", "schedules/families", "schedules/forms"),
        *("schedules/search", "schedules/simulation", "schedules/test_action.py"),
        *("schedules/test_api.py", "schedules/test_costs.py", "schedules/test_edges.py"),
        *("schedules/test_documentation.py", "schedules/test_pages.py"),
        *("schedules/test_placement.py", "schedules/test_registry.py", "why", "job/watching"),
        *("job/test_attempt_files.py", "engine/test_stopwatch.py", "ground/test_atomic_file.py"),
        *("launch/keeping/test_segment.py", "launch/keeping/test_slots.py"),
        *("ground/test_heap.py", "ground/test_log.py"),
        *("cli", "engine/test_step_meter.py", "io/test_killed.py", "job/test_run_progress.py"),
        *("processes/hosts/test_slurm.py", "report/test_compare.py", "starter"),
        *("transport/joining/test_handshake.py", "transport/sockets/test_outbox.py"),
        *("transport/test_interface.py", "transport/test_limit.py", "transport/test_listening.py"),
        *("transport/wire/test_message.py", "transport/wire/test_parsing.py"),
        *("transport/wire/test_structure.py", "ground/test_without_paddle.py"),
        *("watch/test_board.py", "watch/test_server.py", "watch/test_slow_ranks.py"),
    ),
    "reads text, numbers and files of Python's": (
        *("job/test_slurm.py", "report/test_in_a_browser.py", "repository/test_benchmarks.py"),
        *("ground/test_json_value.py", "ground/test_representation.py", "watch/test_command.py"),
    ),
    "reads the repository's files or builds its packages": (
        *("repository/test_environment.py", "repository/test_errors.py", "style", "packaging"),
        *("repository/test_kubernetes.py", "repository/test_repository.py", "test_house.py"),
        "paddle_api/test_private_names.py",
    ),
    "checks what tests are started with, and every started test uses": (
        *("harness/test_forking.py", "harness/test_launching.py", "ground/test_systems.py"),
    ),
    "makes connections, or cuts them and hosts off, below Paddle": (
        *("processes/hosts/test_hosts.py", "processes/hosts/test_two_hosts.py"),
        *("transport/joining/test_connections.py", "transport/joining/test_hosts.py"),
        "transport/joining/test_rendezvous.py",
    ),
    "kills ranks and starts them again: fit/test_resume.py does so on both versions": (
        *("checkpoint/ranks/test_dead_ranks.py", "checkpoint/ranks/test_killed_writers.py"),
        "launch/test_resume.py",
    ),
    "joins on ranks what one process, or fewer axes, shows of both versions": (
        "processes/combinations",
        *("processes/pipeline/test_schedules.py", "processes/examples/test_doors.py"),
        "processes/examples/test_resnet_cifar.py",
    ),
    "sends over Paddle's groups, or reads late: run on 3.3.1 alone until now": (
        *("transport/process_group", "transport/test_late.py", "dygraph/train/test_late.py"),
        *("static/run/test_late.py", "processes/pipeline/test_process_group.py", "doctor"),
    ),
    "rehearses half precision, which 2.6.2's casts on a CPU cannot": (
        *("paddle_api/test_rehearsal.py", "dygraph/train/test_rehearsal.py"),
    ),
    "is what make test-262-cpu runs, on the wheel of 2.6.2 for CPUs": (
        *("processes/examples/test_alexnet.py", "processes/examples/test_gpt.py"),
        *("processes/examples/test_mlp.py", "processes/examples/test_static.py"),
    ),
}
PATHS = tuple(f"tests/{path}" for paths in ONCE.values() for path in paths)


def is_once(test: str) -> bool:
    """Whether a test, by its id, says nothing about the version of Paddle."""
    file = test.partition("::")[0]
    return any(f"{file}/".startswith(f"{path}/") for path in PATHS)


def listing() -> list[str]:
    """What is left out and why, a line for each reason."""
    return [f"left out, as it {reason}: {' '.join(paths)}" for reason, paths in ONCE.items()]

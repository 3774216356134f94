"""Tests that say nothing about the version of Paddle: CI runs them on the newest version only.

``make test-262`` leaves them out (``-m 'not once'``), and the head of its output lists them. What
reads Paddle, or relies on its processes, stays: dynamic and static graph, capture, checkpoints,
Fleet's face, parity, the ranks of a job, and the code of the documentation's pages.
"""

from __future__ import annotations

#: By reason, folders, files and tests below ``tests``. Everything under NO_PADDLE can be collected
#: where no Paddle is, which tests/ground/test_without_paddle.py checks.
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
        *("launch/keeping/test_slots.py", "ground/test_heap.py", "ground/test_log.py"),
        *("cli", "engine/test_step_meter.py", "io/test_killed.py", "job/test_run_progress.py"),
        *("processes/hosts/test_slurm.py", "report/test_compare.py", "starter"),
        *("transport/joining/test_handshake.py", "transport/test_interface.py"),
        *("transport/test_limit.py", "transport/test_listening.py"),
        *("transport/wire/test_message.py", "transport/wire/test_parsing.py"),
        *("transport/wire/test_structure.py", "ground/test_without_paddle.py"),
        *("watch/test_board.py", "watch/test_server.py", "watch/test_slow_ranks.py"),
    ),
    "reads text, numbers and files of Python's": (
        *("job/test_slurm.py", "report/test_in_a_browser.py", "repository/test_benchmarks.py"),
        *("ground/test_json_value.py", "ground/test_representation.py", "watch/test_command.py"),
        "launch/keeping/test_segment.py",
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
        *("transport/joining/test_rendezvous.py", "transport/sockets/test_outbox.py"),
    ),
    "kills ranks and starts them again: fit/test_resume.py does so on both versions": (
        *("checkpoint/ranks/test_dead_ranks.py", "checkpoint/ranks/test_killed_writers.py"),
        "checkpoint/test_saving.py::test_a_kill_at_any_moment_leaves_a_whole_step",
        "launch/test_resume.py",
    ),
    "joins on ranks what one process, or fewer axes, shows of both versions": (
        *("processes/combinations", "processes/captured/test_captured_slices.py"),
        *("processes/pipeline/test_schedules.py", "processes/examples/test_doors.py"),
        *("processes/pipeline/test_edges.py", "processes/pipeline/test_planned.py"),
        *("compat/colossalai/test_ranks.py", "compat/mindspore/test_ranks.py"),
        *("processes/examples/test_resnet_cifar.py", "processes/pipeline/test_post_validation.py"),
        "processes/axes/test_sequences.py::test_checkpoints_and_traces_of_split_sequences",
        "processes/axes/test_sequences.py::test_parity_joins_the_parts_of_sequences",
        "processes/axes/test_sharding.py::test_checkpoints_parity_and_captured_models",
        "processes/axes/test_sharding.py::test_random_jobs",
        "processes/captured/test_captured.py::test_ranks_get_what_one_process_gets[2]",
        "processes/pipeline/test_shared_weights.py::test_three_copies_stay_equal_under_adamw[ZBV]",
        "processes/pipeline/test_slices.py::test_a_model_that_is_no_pipeline_trains_on_two_axes",
        "processes/pipeline/test_slices.py::test_a_pipeline_of_slices_has_parity_and_whole_state",
        "dygraph/observe/test_guards.py::test_all_ranks_name_what_is_broken",
    ),
    "is one more of a table whose other rows run on both versions": (
        "dygraph/train/test_schedules.py::test_the_pipeline_has_the_bits_of_the_single_model",
        "dygraph/train/test_schedules.py::test_any_number_of_micro_batches_will_do",
        "dygraph/train/test_schedules.py::test_loops_take_any_number_of_chunks",
        "launch/test_run.py::test_an_error_is_shown_once_whichever_rank_has_it[failing1]",
        "locator/test_bugs.py::test_a_bug_is_named[column-backward-not-reduced]",
        "locator/test_bugs.py::test_a_right_program_whose_degrees_are_set_to_one_gives_no_alarm",
        "processes/examples/test_run.py::test_the_exit_code_is_that_of_the_rank_that_failed_first",
        "repository/test_notebook.py",
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
    return any(
        test == path or test.startswith((f"{path}/", f"{path}::", f"{path}[")) for path in PATHS
    )


def listing() -> list[str]:
    """What is left out and why, a line for each reason."""
    return [f"left out, as it {reason}: {' '.join(paths)}" for reason, paths in ONCE.items()]

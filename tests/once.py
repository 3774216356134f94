"""Tests that say nothing about the version of Paddle: CI runs them on the newest version only.

``make test-262`` leaves them out (``-m 'not once'``), and the head of its output lists them. What
reads Paddle, or relies on its processes, stays: dynamic and static graph, capture, checkpoints,
Fleet's face, parity, the ranks of a job, and the code of the documentation's pages.
"""

from __future__ import annotations

#: More rows of tables whose other rows run on both versions, each by what its id begins with.
ROWS = """
capture/cutting/test_auto.py::test_nodes_that_write_in_place_are_measured scale index fill
capture/cutting/test_vocabulary.py::test_it_trains_as_the_model_with_the_same_parts False
capture/refusals/test_uncapturable.py::test_in_a_sublayer_the_same_code_is_a_node takes counts
capture/test_in_place.py::test_what_is_written_has_the_bits_of_the_plain_model ZBH1
capture/test_random_models.py::test_a_random_model_gives_its_own_bits 4 5 6 7 8 9 10 11
capture/test_training.py::test_every_schedule_gives_the_bits_of_the_plain_model FThenB Eager Hanayo
capture/test_vision.py::test_a_vision_model_has_the_bits_of_the_plain_one densenet121 resnext50
checkpoint/test_static.py::test_a_program_goes_on_from_dynamic_graph_of_any_layout 4
dygraph/experts/test_losses.py::test_the_single_models_bits Eager kFkB ZBH2 VHalf VMin auto
dygraph/layers/test_vocabulary.py::test_it_has_the_bits_of_one_model_with_the_same_parts 4
dygraph/state/test_tied_weights.py::test_all_gradients_are_the_single_models True
dygraph/train/test_random_lists.py::test_a_random_list_has_the_bits_of_a_plain_loop 2 3
dygraph/train/test_random_models.py::test_a_random_model_has_the_bits_of_plain_paddle 2 3
dygraph/train/test_random_slices.py::test_random_models_have_the_bits_of_plain_layers 5 6 7 8 9
dygraph/train/test_slices.py::test_it_has_the_bits_of_the_single_model_fed_the_same_slices 3
launch/test_run.py::test_an_error_is_shown_once_whichever_rank_has_it failing1
contrib/locator/test_bugs.py::test_a_bug_is_named column-backward-not-reduced
"""

#: By reason, folders, files and tests below ``tests``. Everything under NO_PADDLE can be collected
#: where no Paddle is, which tests/ground/test_without_paddle.py checks.
NO_PADDLE = "imports no Paddle"
ONCE: dict[str, tuple[str, ...]] = {
    NO_PADDLE: (
        *("launch/supervisor", "partition", "profiling", "contrib/report/test_page.py"),
        *("contrib/report/test_run.py", "schedules/check", "schedules/families", "schedules/forms"),
        *("contrib/search", "schedules/simulation", "schedules/test_pages.py"),
        *("schedules/test_registry.py", "schedules/test_terms.py", "contrib/why", "job/watching"),
        *("job/test_attempt_files.py", "ground/test_atomic_file.py", "ground/test_heap.py"),
        *("contrib/kept_state/test_slots.py", "ground/test_log.py"),
        *("cli", "io/test_killed.py", "job/test_run_progress.py"),
        *("processes/hosts/test_slurm.py", "contrib/report/test_compare.py", "contrib/starter"),
        *("transport/joining/test_handshake.py", "transport/test_limit.py"),
        "transport/test_listening.py",
        *("transport/wire/test_message.py", "transport/wire/test_structure.py"),
        "ground/test_without_paddle.py",
        *(
            "contrib/watch/test_board.py",
            "contrib/watch/test_server.py",
            "contrib/watch/test_slow_ranks.py",
        ),
    ),
    "reads text, numbers and files of Python's": (
        *(
            "engine/test_step_meter.py",
            "job/test_slurm.py",
            "contrib/report/test_in_a_browser.py",
            "repository/test_benchmarks.py",
        ),
        *(
            "ground/test_json_value.py",
            "ground/test_representation.py",
            "contrib/watch/test_command.py",
        ),
        "contrib/kept_state/test_segment.py",
    ),
    "reads the repository's files or builds its packages": (
        *("repository/test_repository.py", "repository/test_errors.py", "style", "packaging"),
        *("repository/test_kubernetes.py", "test_house.py", "paddle_api/test_private_names.py"),
    ),
    "checks what tests are started with, and every started test uses": (
        *("harness/test_forking.py", "harness/test_launching.py", "ground/test_systems.py"),
    ),
    "makes connections, cuts them or hosts off, or stops ranks, below Paddle": (
        "processes/failures/test_failures.py::test_a_job_that_is_suspended_as_a_whole_accuses_nobody",
        "processes/failures/test_failures.py::test_a_rank_that_stops_and_goes_on_changes_no_bit",
        "processes/hosts/test_start.py::test_a_stopped_rank_is_named_within_the_limit",
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
        "processes/pipeline/test_schedules.py",
        *("contrib/compat/colossalai/test_ranks.py", "contrib/compat/mindspore/test_ranks.py"),
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
        "contrib/locator/test_bugs.py::test_a_right_program_whose_degrees_are_set_to_one_gives_no_alarm",
        "processes/examples/test_run.py::test_the_exit_code_is_that_of_the_rank_that_failed_first",
        "repository/test_notebook.py",
        *(
            f"{test}[{row}"
            for test, *rows in map(str.split, ROWS.strip().splitlines())
            for row in rows
        ),
    ),
    "sends over Paddle's groups, or reads late: run on 3.3.1 alone until now": (
        "transport/process_group/test_threaded.py",
        *("static/run/test_late.py", "processes/pipeline/test_process_group.py", "contrib/doctor"),
    ),
    "rehearses half precision, which 2.6.2's casts on a CPU cannot": (
        *("paddle_api/test_rehearsal.py", "dygraph/train/test_rehearsal.py"),
    ),
    "is what make test-262-cpu runs, on the wheel of 2.6.2 for CPUs": (
        *("processes/examples/test_examples.py", "static/run/test_epochs.py"),
    ),
}
PATHS = tuple(f"tests/{path}" for paths in ONCE.values() for path in paths)


def is_once(test: str) -> bool:
    """Whether a test, by its id, says nothing about the version of Paddle."""
    return any(
        test == path
        or test.startswith((f"{path}/", f"{path}::", f"{path}[", *([path] if "[" in path else ())))
        for path in PATHS
    )


def listing() -> list[str]:
    """What is left out and why, a line for each reason."""
    return [f"left out, as it {reason}: {' '.join(paths)}" for reason, paths in ONCE.items()]

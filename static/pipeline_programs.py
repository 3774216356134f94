"""Finds the pipeline of a program: ``minimize`` stores it at the program and its startup.

What is known of a program is stored as attributes of Paddle's program object; the ``refuse_``
functions refuse programs that a pipeline does not run.
"""

from __future__ import annotations

import weakref

from fleetpipe.aliases import Program, Scope
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import found_tensor, is_parsed_from, operation_count
from fleetpipe.static import ir
from fleetpipe.static.run.pipeline import StaticPipeline

#: The attributes of a main program and of a startup program with ``(program, pipeline)``. A clone
#: has the attribute of the program that it was cloned from.
_PIPELINE, _STARTUP = "_fleetpipe", "_fleetpipe_startup"
#: The attribute of a program with the number of operations that it had when it was minimized.
_SIZE = "_fleetpipe_size"
#: The prefix of values that Paddle 2.6.2 adds to a program when it is exported.
_EXPORTED = "save_infer_model/"
#: The main programs of this process's pipelines.
_main_programs: weakref.WeakSet[Program] = weakref.WeakSet()
#: The attribute of a program with the names of parameters and statistics that it takes.
_TAKEN = "_fleetpipe_taken"
#: The attribute of a program with the class of an average of its parameters.
_AVERAGE = "_fleetpipe_average"
#: The pipelines of this process.
_pipelines: weakref.WeakSet[StaticPipeline] = weakref.WeakSet()


def attach(program: Program, startup: Program, pipeline: StaticPipeline) -> None:
    """Stores a pipeline at its program and startup program."""
    setattr(program, _PIPELINE, (program, pipeline))
    setattr(program, _SIZE, operation_count(program))
    _pipelines.add(pipeline)
    _main_programs.add(program)
    setattr(startup, _STARTUP, (startup, pipeline))


def note_clone(program: Program, clone: Program) -> None:
    """Marks a clone of a pipeline's program as a copy; under PIR clones are not marked."""
    program_and_pipeline = getattr(program, _PIPELINE, None)
    if program_and_pipeline is not None:
        setattr(clone, _PIPELINE, program_and_pipeline)


def note_parsed(description: bytes, parsed: Program) -> None:
    """Marks ``parsed`` as a copy if ``description`` has the bytes of a pipeline's program."""
    for program in _main_programs:
        if is_parsed_from(program, description):
            note_clone(program, parsed)


def refuse_second(program: Program) -> None:
    """Refuses to minimize a program twice: the second pipeline would replace the first."""
    _refuse_average(getattr(program, _AVERAGE, None))
    pipeline, is_main = find_pipeline(program)
    if pipeline is not None and is_main and pipeline.job is current_job():
        raise ConfigError(
            "the program was minimized before: a static pipeline has one loss and one optimizer",
            fix="minimize the sum of the losses; or build each in a program and startup of its "
            "own, whose layers have the same names where they share parameters",
        )


def note_average(program: Program, name: str) -> None:
    """Records that a program has an average of its parameters, of class ``name``.

    Raises:
        ConfigError: The program is a pipeline's.
    """
    setattr(program, _AVERAGE, name)
    if find_pipeline(program)[0] is not None:
        _refuse_average(name)


def _refuse_average(name: str | None) -> None:
    """Refuses an average of parameters in a pipeline's program; None is no average."""
    if name is not None:
        raise ConfigError(
            f"a static pipeline does not run {name}",
            cause="its operations belong behind the optimizer's step, which is in no program here",
            fix="after exe.run: for name, value in fleetpipe.static.state_dict().items(): "
            "average[name] = 0.999 * average[name] + 0.001 * value; to evaluate with it, "
            "fleetpipe.static.load_state_dict(average)",
        )


def refuse_appended(program: Program, pipeline: StaticPipeline) -> None:
    """Refuses a program to which operations were appended since it was minimized.

    Operations that Paddle 2.6.2 appends when it exports a program are allowed.
    """
    if operation_count(program) == getattr(program, _SIZE):
        return
    graph = ir.read(program).graph
    before = [op for op in pipeline.split.graph.operations if not op.floating]
    after = [op for op in graph.operations if not op.floating]
    appended = [
        op
        for op in after[len(before) :]
        if not any(graph.names.get(value, "").startswith(_EXPORTED) for value in op.writes)
    ]
    setattr(program, _SIZE, operation_count(program) - len(appended))
    if appended:
        raise ConfigError(
            "operations were appended to the program after minimize, which no stage runs",
            where=f"{appended[0]} is the first of {len(appended)}",
            fix="build what every micro-batch computes before minimize, under a guard; compute "
            "what is done once a batch, such as averages of parameters, from "
            "fleetpipe.static.state_dict() after exe.run",
        )


def refuse_foreign(program: Program, scope: Scope) -> None:
    """Refuses a program that takes parameters or statistics which only other ranks have.

    ``Executor.run`` calls this before it runs a program that is no pipeline's: a clone for
    evaluation would change running statistics before it fails.

    Args:
        program: A program that is no pipeline's.
        scope: The scope that it will run in; None for the global scope.
    """
    for pipeline in _pipelines:
        if pipeline.local:
            continue
        variables = paddle.static.global_scope() if scope is None else scope
        for name in sorted(_taken_names(program) & pipeline.elsewhere):
            if found_tensor(variables, name) is None:
                raise ConfigError(
                    f"the program needs {name!r}, which another rank of the pipeline has",
                    cause="each rank has the parameters of its own stages only; this program, "
                    "perhaps a clone for evaluation, has those of several",
                    fix="call fleetpipe.static.save_inference_model on every rank, and evaluate "
                    "what load_inference_model gives in a scope of its own",
                )


def _taken_names(program: Program) -> frozenset[str]:
    """Returns the parameters and statistics that a program takes; the result is cached."""
    names: frozenset[str] | None = getattr(program, _TAKEN, None)
    if names is None:
        try:
            graph = ir.read(program).graph
        except Exception:
            return frozenset()  # Paddle itself reports what is wrong, as with a compiled program
        taken = {value for op in graph.operations for value in op.reads}
        names = frozenset(graph.names[value] for value in taken & graph.persistable)
        setattr(program, _TAKEN, names)
    return names


def is_attached(program: Program) -> bool:
    """Returns whether a program is a pipeline's main or startup program, or a clone of one."""
    return (
        getattr(program, _PIPELINE, None) is not None
        or getattr(program, _STARTUP, None) is not None
    )


def find_pipeline(program: Program) -> tuple[StaticPipeline | None, bool]:
    """Returns the pipeline of a program, and whether the program itself was minimized.

    Returns:
        The pipeline and True for the program that was minimized; the pipeline and False for a clone
        of it; None and False for any other program.
    """
    main, pipeline = getattr(program, _PIPELINE, None) or (None, None)
    return pipeline, main is program


def pipeline_of_startup(program: Program) -> StaticPipeline | None:
    """Returns the pipeline that a startup program initialises; None for any other program."""
    startup, pipeline = getattr(program, _STARTUP, None) or (None, None)
    # A copy of a startup program has its attribute, but does not initialise the pipeline.
    return pipeline if startup is program else None


def pipeline_of(program: Program = None) -> StaticPipeline:
    """Returns the pipeline that ``minimize`` created for a program.

    Args:
        program: A program; None for the default main program.

    Raises:
        StateError: The program has no pipeline.
    """
    program = paddle.static.default_main_program() if program is None else program
    pipeline, _ = find_pipeline(program)
    if pipeline is None:
        raise StateError(
            "the program is no pipeline",
            fix="make it one: fleet.distributed_optimizer(optimizer, strategy).minimize(loss)",
        )
    return pipeline

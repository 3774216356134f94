"""Which programs are a pipeline's: ``minimize`` notes it on the program and on its startup."""

from __future__ import annotations

import weakref
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.errors import ConfigError
from fleetpipe.static import readers

_PIPELINE, _STARTUP = "_fleetpipe", "_fleetpipe_startup"
_pipelines: weakref.WeakSet[Any] = weakref.WeakSet()


def attach(program: Any, startup: Any, pipeline: Any) -> None:
    """Makes a program and its startup program those of a pipeline."""
    setattr(program, _PIPELINE, (program, pipeline))
    _pipelines.add(pipeline)
    setattr(startup, _STARTUP, (startup, pipeline))


def refuse_foreign(program: Any) -> None:
    """Explains why a program that is no pipeline's could not run, where that is known.

    Raises:
        ConfigError: It needs parameters that a pipeline has on other ranks.
    """
    try:
        graph = readers.read(program).graph
    except Exception:
        return  # another kind of program, which failed for reasons of its own
    names = {graph.names[value] for value in graph.persistable}
    for pipeline in _pipelines:
        elsewhere = pipeline.split.persistable - set(pipeline.persistable)
        missing = sorted(names & elsewhere)
        if missing:
            raise ConfigError(
                f"the program needs {missing[0]!r}, which another rank of the pipeline has",
                cause="each rank has the parameters of its own stages only; this program, perhaps "
                "a clone for evaluation, has those of several",
                fix="call fleetpipe.static.save_inference_model on every rank, and evaluate what "
                "load_inference_model gives in a scope of its own",
            )


def is_attached(program: Any) -> bool:
    """Whether a program is a pipeline's main or startup program, or a clone of one."""
    return (
        getattr(program, _PIPELINE, None) is not None
        or getattr(program, _STARTUP, None) is not None
    )


def of_main(program: Any) -> tuple[Any, bool]:
    """Returns the pipeline of a main program or None, and whether it is that one, not a clone."""
    main, pipeline = getattr(program, _PIPELINE, None) or (None, None)
    return pipeline, main is program


def of_startup(program: Any) -> Any | None:
    """Returns the pipeline that a startup program initialises; None for a clone or another."""
    startup, pipeline = getattr(program, _STARTUP, None) or (None, None)
    return pipeline if startup is program else None


def pipeline_of(program: Any = None) -> Any:
    """Returns the pipeline that ``minimize`` made of a program.

    Args:
        program: A program; None for the default main program.

    Raises:
        ConfigError: It is none.
    """
    program = paddle.static.default_main_program() if program is None else program
    pipeline, _ = of_main(program)
    if pipeline is None:
        raise ConfigError("the program is no pipeline: distributed_optimizer(..).minimize makes it")
    return pipeline

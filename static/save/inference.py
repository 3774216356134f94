"""Exporting the network of a pipeline, the parameters of all its stages, as one program."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path

from fleetpipe.aliases import Program, Variable
from fleetpipe.atomic_file import replacing
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import static
from fleetpipe.static.pipeline_programs import pipeline_of
from fleetpipe.static.save.state import full_state_dict


def save_inference_model(
    prefix: str | os.PathLike[str],
    feed_vars: Sequence[Variable],
    fetch_vars: Sequence[Variable],
    executor: object,
    program: Program = None,
) -> None:
    """Writes the whole network, with the parameters of all stages, as one program for inference.

    Collective over the pipeline; the process of the first rank of the first replica writes.

    Args:
        prefix: As for ``paddle.static.save_inference_model``, which reads back as usual.
        feed_vars: What the network is fed.
        fetch_vars: What it returns.
        executor: An executor.
        program: The program of the pipeline; None for the default main program.
    """
    program = static.default_main_program() if program is None else program
    pipeline = pipeline_of(program)
    state = full_state_dict(program)
    if not pipeline.job.leads():
        return
    scope = static.Scope()
    for name, value in state.items():
        scope.var(name).get_tensor().set(value, paddle.CPUPlace())
    stock = inspect.unwrap(static.save_inference_model)
    target = Path(prefix)
    with static.scope_guard(scope), replacing(target.parent) as draft:
        network = (list(feed_vars), list(fetch_vars), executor)
        stock(str(draft / target.name), *network, program=program)

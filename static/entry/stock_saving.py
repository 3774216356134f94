"""``paddle.static.save``, ``load`` and ``save_inference_model`` for a program that is a pipeline's.

Stock ones look for the parameters of the whole program, of which a rank has a part, and for the
optimizer's state in the program, where a pipeline has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fleetpipe.aliases import Program, Variable
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.static import static
from fleetpipe.static.pipeline_programs import of_main
from fleetpipe.static.save import files


def save(
    original: Callable[..., object],
    program: Program,
    model_path: str | os.PathLike[str],
    protocol: int = 4,
    **configs: object,
) -> None:
    """Saves what this process has of a pipeline.

    The files are those of Paddle; one process that has all stages adds the network's description.
    """
    pipeline, _ = of_main(program)
    if pipeline is None:
        original(program, model_path, protocol, **configs)
        return

    def describe(path: str) -> None:
        original(program, path, protocol, **configs)

    files.save(model_path, program, protocol, describe if pipeline.local else None)


def load(
    original: Callable[..., object],
    program: Program,
    model_path: str | os.PathLike[str],
    executor: object = None,
    var_list: Sequence[Variable] | None = None,
) -> None:
    """Loads what :func:`save` wrote, on as many ranks as then or from a process that had all.

    Raises:
        CheckpointError: There is no such file, it is none of Paddle's, or of other stages; nothing
            was changed.
    """
    if of_main(program)[0] is None:
        original(program, model_path, executor, var_list)
    else:
        files.load(model_path, program)


def save_inference_model(
    original: Callable[..., Any],
    path_prefix: str | os.PathLike[str],
    feed_vars: Sequence[Variable],
    fetch_vars: Sequence[Variable],
    executor: object,
    **named: Any,
) -> Any:
    """Refuses on several ranks, of which none has the whole network.

    Raises:
        ConfigError: The program is a pipeline's, and this process has a part of its stages.
    """
    program = named.get("program") or static.default_main_program()
    pipeline, _ = of_main(program)
    if pipeline is not None and not pipeline.local:
        raise ConfigError(
            "paddle.static.save_inference_model of a pipeline needs the parameters of all ranks",
            fix="call fleetpipe.static.save_inference_model(prefix, feed_vars, fetch_vars, exe) on "
            "every rank: it gathers them, and one rank writes",
        )
    return original(path_prefix, feed_vars, fetch_vars, executor, **named)

"""``launch_from_torch``: reads a configuration and begins the job that it describes."""

from __future__ import annotations

import argparse
import random

import numpy as np

from fleetpipe import fleet
from fleetpipe.compat.colossalai.configuration import Config, ConfigSource
from fleetpipe.compat.colossalai.context import gpc
from fleetpipe.compat.colossalai.logging import get_dist_logger
from fleetpipe.paddle_api import paddle

#: ColossalAI's own.
DEFAULT_SEED = 1024


def get_default_parser() -> argparse.ArgumentParser:
    """Returns a parser with the options of ColossalAI's that a launcher or a user may pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="path of the configuration")
    parser.add_argument("--backend", default="gloo", help="accepted without effect")
    return parser


def launch_from_torch(
    config: ConfigSource, backend: str = "gloo", seed: int = DEFAULT_SEED, verbose: bool = True
) -> None:
    """Begins the job. Collective over all processes that the launcher started.

    Ranks and addresses are those of ``paddle.distributed.launch`` (``fleetpipe run --nproc``); a
    process that nobody launched plays all ranks of the pipeline itself. All processes that the
    pipeline does not need are its replicas.

    Args:
        config: A mapping, or the path of a Python file that assigns ``NUM_MICRO_BATCHES`` (the
            number of micro-batches of a batch), ``parallel = dict(pipeline=2)``, and if wanted
            ``NUM_CHUNKS``, ``TENSOR_SHAPE`` and ``SCHEDULE`` (a schedule of fleetpipe's by name).
            It is kept as ``gpc.config``, with whatever else it has.
        backend: Accepted without effect.
        seed: Seeds Python's, NumPy's and Paddle's generators.
        verbose: Whether rank 0 says which ranks there are.

    Raises:
        ConfigError: An entry has a value that cannot be used, the ranks do not fit the number of
            processes, or torchrun or mpirun started these.
        UsageError: ``config`` is neither a mapping nor a path.
        PipelineTimeout: Some rank did not arrive within the limit.
    """
    read = Config.read(config)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": -1, "pp_degree": read.pipeline}
    strategy.pipeline_configs = {
        "accumulate_steps": read.micro_batches,
        "schedule_mode": read.schedule,
    }
    fleet.init(is_collective=True, strategy=strategy)
    gpc.load_config(read)
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)
    if verbose:
        sizes = f"{gpc.pipeline_parallel_size} pipeline ranks, {gpc.data_parallel_size} replicas"
        get_dist_logger().info(sizes, ranks=[0])

"""``gpc``: tells a program its place among the ranks of the job that runs.

``launch_from_torch`` reads a configuration and begins the job that it describes.
"""

from __future__ import annotations

import argparse
import enum
import random

import numpy as np

from fleetpipe import fleet
from fleetpipe.aliases import Topology
from fleetpipe.contrib.compat.colossalai.configuration import Config, ConfigSource
from fleetpipe.contrib.compat.colossalai.logging import get_dist_logger
from fleetpipe.errors import StateError
from fleetpipe.job.job import Job, current_job, required_job
from fleetpipe.paddle_api import paddle


class ParallelMode(enum.Enum):
    """The kinds of groups that a rank is in."""

    GLOBAL = "global"
    DATA = "data"
    PIPELINE = "pipe"
    TENSOR = "tensor"


class GlobalContext:
    """The configuration of the program and this process's place; there is one, ``gpc``.

    A process that plays all ranks of a pipeline is its first rank and its last.
    """

    def __init__(self) -> None:
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        """The configuration that ``launch_from_torch`` was given.

        Raises:
            StateError: ``launch_from_torch`` was not called.
        """
        if self._config is None:
            raise StateError(
                "the program was not launched",
                fix="call launch_from_torch(config=dict(parallel=dict(pipeline=2), ..)) first",
            )
        return self._config

    @property
    def configured_chunks(self) -> int | None:
        """``NUM_CHUNKS`` of the configuration; None without it or without a configuration."""
        return None if self._config is None else self._config.get("NUM_CHUNKS")

    def load_config(self, config: Config) -> None:
        """Sets the configuration of the job."""
        self._config = config

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of ranks of a pipeline."""
        return self.get_world_size(ParallelMode.PIPELINE)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the pipeline."""
        return self.get_world_size(ParallelMode.DATA)

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share each layer, which is 1."""
        return self.get_world_size(ParallelMode.TENSOR)

    def get_world_size(self, mode: ParallelMode) -> int:
        """Returns how many ranks are in a group.

        Raises:
            StateError: The program was not launched.
        """
        job = self._job()
        degrees = job.degrees
        sizes = {
            ParallelMode.GLOBAL: degrees.dp * degrees.pp,
            ParallelMode.DATA: degrees.dp,
            ParallelMode.PIPELINE: degrees.pp,
            ParallelMode.TENSOR: degrees.mp,
        }
        return sizes[mode]

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Returns this process's rank in a group; 0 if it plays all ranks.

        Raises:
            StateError: The program was not launched.
        """
        hcg: Topology = self._job().hcg
        ranks = {
            ParallelMode.GLOBAL: hcg.get_global_rank,
            ParallelMode.DATA: hcg.get_data_parallel_rank,
            ParallelMode.PIPELINE: hcg.get_stage_id,
            ParallelMode.TENSOR: hcg.get_model_parallel_rank,
        }
        return int(ranks[mode]())

    def get_global_rank(self) -> int:
        """Returns this process's rank in the job."""
        return self.get_local_rank(ParallelMode.GLOBAL)

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Returns whether the job runs; all groups exist with it."""
        return isinstance(mode, ParallelMode) and current_job() is not None

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Returns whether this process is the first of a group."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Returns whether this process is the last of a group, or plays the last one."""
        job = self._job()
        played = job.local and mode in (ParallelMode.PIPELINE, ParallelMode.GLOBAL)
        return played or self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Returns whether this process is the first rank of its pipeline.

        Args:
            ignore_virtual: Accepted without effect.
        """
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Returns whether this process is the last rank of its pipeline.

        Args:
            ignore_virtual: Accepted without effect.
        """
        return self.is_last_rank(ParallelMode.PIPELINE)

    def destroy(self) -> None:
        """Ends the job, as ``fleet.shutdown`` does, and forgets the configuration.

        Raises:
            PeerFailed: Another rank has failed.
            PipelineTimeout: Another rank did not take what was sent to it within the limit.
        """
        self._config = None
        fleet.shutdown()

    def _job(self) -> Job:
        fix = "call launch_from_torch(config=..) first"
        return required_job("there is no job yet, or it has ended", fix=fix)


#: The one object that ColossalAI calls ``global_context``, and its programs ``gpc``.
gpc = GlobalContext()


#: ColossalAI's own.
DEFAULT_SEED = 1024


def get_default_parser() -> argparse.ArgumentParser:
    """Returns a parser with ColossalAI's options ``--config`` and ``--backend``."""
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
            ``gpc.config`` keeps it, with all its other entries.
        backend: Accepted without effect.
        seed: Seeds Python's, NumPy's and Paddle's generators.
        verbose: Whether rank 0 logs how many ranks and replicas there are.

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

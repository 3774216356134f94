"""Which names of Fleet's the libraries built on it need, and since which of their versions.

Most are private to Fleet, and fleetpipe has no use of its own for them: this is the one place that
says why they are there. ``docs/libraries.md`` shows the table.
"""

from __future__ import annotations

from typing import NamedTuple


class Need(NamedTuple):
    """Names that a library takes from Fleet.

    Attributes:
        library: The library, and the first version that was read and run here.
        owner: What has them, below ``fleetpipe.fleet.meta_parallel`` or in ``fleetpipe.dygraph``.
        names: The names.
        meaning: What they mean here.
    """

    library: str
    owner: str
    names: tuple[str, ...]
    meaning: str


NEEDS = (
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineLayer",
        ("_synchronize_shared_weights",),
        "makes the copies of tied weights equal, after a checkpoint was read",
    ),
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineLayer",
        ("get_stage_from_index", "_stage_id", "_layers_desc"),
        "which prefix a tied weight has in the files of the single model",
    ),
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineParallel",
        ("_prepare_training", "forward_backward_pipeline"),
        "the Trainer's step; the optimizer is bound in the first",
    ),
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineParallel",
        ("_dp_comm_overlap", "_sharding_comm_overlap", "_chunk_2_comm_buffers"),
        "False, False and empty: gradients are reduced once, after the last backward",
    ),
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineParallel",
        ("_p2p_helper",),
        "its clear_meta_cache has nothing to clear",
    ),
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineOptimizer",
        ("_sharding_enable", "_dp_enable", "_sep_enable"),
        "False: the Trainer would reduce a second time what is reduced already",
    ),
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineOptimizer",
        ("_inner_opt", "_hcg", "_step"),
        "the user's optimizer, the topology, and a step over all its parameters",
    ),
    Need(
        "PaddleNLP 3.0.0b4",
        "PipelineOptimizer",
        ("_param2rank",),
        "which sharding rank keeps the state of a parameter: the unified checkpoint asks",
    ),
    Need(
        "PaddleFormers 0.4.1",
        "PipelineOptimizer",
        ("_parameter_list", "_create_accumulators"),
        "the user's optimizer's own",
    ),
    Need(
        "PaddleFormers 1.2.0",
        "meta_parallel",
        ("LocalSharedLayerDesc", "PipelineDatasetPreprocessor"),
        "a tie within one rank; data that a function gives when the step begins",
    ),
    Need(
        "PaddleFormers 1.2.0",
        "GlobalNormClip",
        ("_global_norm",),
        "is told the squared norm; the Trainer logs it from there",
    ),
)

"""Refuses options in the ``config`` of a library's model that do not work in a pipeline.

Without this check the model would fail in its first batch, on one rank, in a missing kernel, or
silently train wrongly.
"""

from __future__ import annotations

import importlib.metadata

from fleetpipe.aliases import Layer
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.mesh.axes import SEQUENCE
from fleetpipe.paddle_api.amp import rehearsal_dtype
from fleetpipe.paddle_api.device import device_kind

#: The libraries, by the names of their packages.
LIBRARIES = ("paddlenlp", "paddleformers")
#: PaddleFormers' norm, and the first version that fuses it by default.
NORM, FUSES_SINCE = "paddleformers.nn.norm.RMSNorm", (1, 1)


def refuse_library_options(model: Layer) -> None:
    """Checks the ``config`` of a model whose class comes from one of the libraries.

    Raises:
        ConfigError: Its attention would see only one rank's part of a sequence, or its experts are
            spread without ``ep_degree``; on a CPU, its dtype is float16 or bfloat16, or it calls a
            fused kernel.
    """
    origins = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if origins.isdisjoint(LIBRARIES):
        return
    _refuse_lost_degrees(model)
    if device_kind() != "cpu":
        return
    config = model.config
    if config.dtype in ("float16", "bfloat16") and config.dtype != rehearsal_dtype():
        raise ConfigError(
            f"the library's layers do not run in {config.dtype} on a CPU",
            got=f"{type(model).__name__} with config.dtype={config.dtype!r}",
            cause="the checkpoint has that dtype, or from_pretrained was given it; Paddle has no "
            "CPU kernels for some of the layers",
            fix='from_pretrained(.., dtype="float32"), or strategy.fleetpipe_configs = '
            f"{{'rehearse': {config.dtype!r}}}",
        )
    if getattr(config, "use_fused_rms_norm", False):
        raise ConfigError(
            "use_fused_rms_norm has no kernel on a CPU",
            got=f"{type(model).__name__} with config.use_fused_rms_norm=True",
            cause="the library imports it from fused_ln or fast_ln, which are built with CUDA",
            fix="use_fused_rms_norm=False",
        )
    if _fuses_norms(model):
        raise ConfigError(
            "fuse_rms_norm needs a kernel that CPUs do not have",
            got=f"{type(model).__name__} with config.fuse_rms_norm="
            f"{getattr(config, 'fuse_rms_norm', 'not set')}",
            cause="PaddleFormers switches it on by default since 1.1",
            fix="config.fuse_rms_norm = False before the model is built, or in its config.json",
        )


def _refuse_lost_degrees(model: Layer) -> None:
    """Refuses degrees in the model's config, set by a library's Trainer, that its layers ignore."""
    job = current_job()
    ranks = 1 if job is None else job.degrees.split(*SEQUENCE)
    if ranks > 1:
        raise ConfigError(
            "the library's attention does not reach the places of other ranks",
            got=f"{type(model).__name__} with sep_degree x cp_degree = {ranks}",
            cause="--sep_parallel_degree or --context_parallel_degree (PaddleFormers: _size); "
            "PaddleNLP's exchange takes its arguments in the order of Paddle 2.6, its ring needs a "
            "kernel of GPUs, and PaddleFormers' models have neither",
            fix="--sequence_parallel 1 with --tensor_parallel_degree, or a model of your own that "
            "calls fleetpipe.dygraph.sequences.attention",
        )
    has_own_groups = (
        job is not None and job.degrees.ep == 1 and hasattr(job.hcg, "expert_parallel_group")
    )
    if has_own_groups and any(map(is_spread, model.parameters())):
        raise ConfigError(
            "the mesh does not know along which ranks the library spreads experts",
            got=f"{type(model).__name__} with --expert_parallel_degree and ep_degree=1",
            cause="PaddleNLP's Trainer makes groups of its own for them",
            fix="strategy.hybrid_configs = {'ep_degree': 2, ..}, which PaddleFormers' "
            "--expert_model_parallel_size sets",
        )


def _fuses_norms(model: Layer) -> bool:
    """Returns whether PaddleFormers' norms would call Paddle's ``fused_rms_norm_ext``."""
    kinds = {kind for layer in model.sublayers() for kind in type(layer).__mro__}
    if all(f"{kind.__module__}.{kind.__name__}" != NORM for kind in kinds):
        return False
    fused = getattr(model.config, "fuse_rms_norm", None)
    if fused is None:
        numbers = importlib.metadata.version("paddleformers").split(".")
        return tuple(map(int, numbers[:2])) >= FUSES_SINCE
    return bool(fused)

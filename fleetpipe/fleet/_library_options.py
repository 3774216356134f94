"""Refuses, by name, what a model of a library is asked to do and its layers cannot do on a CPU.

Such a model tells its options in ``config``. Without this it would fail in its first batch, on one
rank, in a kernel that is not there.
"""

from __future__ import annotations

import importlib.metadata

from fleetpipe.aliases import Layer
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.device import device_kind

LIBRARIES = ("paddlenlp", "paddleformers")
#: PaddleFormers' norm, and the first version that fuses it where the configuration says nothing.
NORM, FUSES_SINCE = "paddleformers.nn.norm.RMSNorm", (1, 1)


def refuse_library_options(model: Layer) -> None:
    """Looks at the configuration of a model whose class comes from one of the libraries.

    Raises:
        ConfigError: On a CPU, its values are float16 or bfloat16, it cuts sequences, or it calls a
            fused kernel.
    """
    origins = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if origins.isdisjoint(LIBRARIES) or device_kind() != "cpu":
        return
    config = model.config
    if config.dtype in ("float16", "bfloat16"):
        raise ConfigError(
            f"the library's layers do not run in {config.dtype} on a CPU",
            got=f"{type(model).__name__} with config.dtype={config.dtype!r}",
            cause="the checkpoint has that dtype, or from_pretrained was given it; Paddle has no "
            "CPU kernels for some of the layers",
            fix='from_pretrained(.., dtype="float32")',
        )
    if getattr(config, "use_fused_rms_norm", False):
        raise ConfigError(
            "use_fused_rms_norm has no kernel on a CPU",
            got=f"{type(model).__name__} with config.use_fused_rms_norm=True",
            cause="the library imports it from fused_ln or fast_ln, which are built with CUDA",
            fix="use_fused_rms_norm=False",
        )
    if getattr(config, "sequence_parallel", False):
        raise ConfigError(
            "sequence_parallel is not run on a CPU",
            got=f"{type(model).__name__} with config.sequence_parallel=True",
            cause="its layers need a reduce_scatter, which Gloo does not have",
            fix="sequence_parallel=False",
        )
    if _fuses_norms(model):
        raise ConfigError(
            "fuse_rms_norm needs a kernel that CPUs do not have",
            got=f"{type(model).__name__} with config.fuse_rms_norm="
            f"{getattr(config, 'fuse_rms_norm', 'not set')}",
            cause="PaddleFormers switches it on by default since 1.1",
            fix="config.fuse_rms_norm = False before the model is built, or in its config.json",
        )


def _fuses_norms(model: Layer) -> bool:
    """Tells whether PaddleFormers' norms would call Paddle's ``fused_rms_norm_ext``."""
    kinds = {kind for layer in model.sublayers() for kind in type(layer).__mro__}
    if all(f"{kind.__module__}.{kind.__name__}" != NORM for kind in kinds):
        return False
    fused = getattr(model.config, "fuse_rms_norm", None)
    if fused is None:
        numbers = importlib.metadata.version("paddleformers").split(".")
        return tuple(map(int, numbers[:2])) >= FUSES_SINCE
    return bool(fused)

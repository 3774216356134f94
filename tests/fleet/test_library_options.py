"""Options of a library's model that cannot run on a CPU are refused before anything trains."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.errors import ConfigError
from fleetpipe.fleet import _library_options
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from fleetpipe.mesh.axes import Degrees
from fleetpipe.paddle_api.device import device_kind
from tests.pipelines import job, mlp_layers

pytestmark = pytest.mark.skipif(device_kind() == "gpu", reason="these run on a GPU")


class TheirLayers(PipelineLayer):
    """A class of the library's, to all who ask where it comes from."""

    __module__ = "paddlenlp.transformers.any.modeling_pp"


def model(kind: type[PipelineLayer], **options: Any) -> Any:
    layers = kind(mlp_layers(), num_stages=2, loss_fn=paddle.nn.CrossEntropyLoss())
    layers.config = SimpleNamespace(**{"dtype": "float32", **options})
    return layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, r"(?s)bfloat16 on a CPU.*TheirLayers.*dtype=\"float32\""),
        ({"dtype": "float16"}, r"float16 on a CPU"),
        ({"use_fused_rms_norm": True}, r"(?s)use_fused_rms_norm.*TheirLayers"),
    ],
)
def test_an_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with job(2):
        with pytest.raises(ConfigError, match=message):
            fleet.distributed_model(model(TheirLayers, **options))
        # A user's own model may mean something else by these words.
        fleet.distributed_model(model(PipelineLayer, **options))


@pytest.mark.parametrize(
    ("version", "options", "refused"),
    [
        ("0.4.1", {}, False),
        ("1.0.0", {"fuse_rms_norm": True}, True),
        ("1.1.1", {}, True),
        ("1.2.0", {"fuse_rms_norm": False}, False),
    ],
)
def test_a_fused_norm_is_refused_where_it_would_be_called(
    version: str, options: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    norm = type("RMSNorm", (paddle.nn.Linear,), {"__module__": "paddleformers.nn.norm"})
    layers = [LayerDesc(norm, 6, 4), paddle.nn.functional.tanh]
    with job(2):
        built = TheirLayers(layers, num_stages=2, loss_fn=paddle.nn.CrossEntropyLoss())
        built.config = SimpleNamespace(dtype="float32", **options)
        if refused:
            with pytest.raises(ConfigError, match=r"fuse_rms_norm needs a kernel"):
                fleet.distributed_model(built)
        else:
            fleet.distributed_model(built)


def test_what_runs_is_not_refused() -> None:
    with job(2):
        for dtype in ("float32", None):
            fleet.distributed_model(model(TheirLayers, dtype=dtype))


def test_flags_of_a_trainer_that_its_layers_do_not_take_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with job(2) as running:
        layers = model(TheirLayers)
        with monkeypatch.context() as patch:
            degrees = Degrees(sep=2)
            patch.setattr(_library_options, "current_job", lambda: SimpleNamespace(degrees=degrees))
            with pytest.raises(ConfigError, match=r"(?s)sep_parallel_degree.*--sequence_parallel"):
                fleet.distributed_model(layers)
        running.hcg.expert_parallel_group = None
        fleet.distributed_model(layers)
        layers = model(TheirLayers)
        layers.parameters()[0].no_sync = True
        with pytest.raises(ConfigError, match=r"(?s)--expert_parallel_degree.*ep_degree"):
            fleet.distributed_model(layers)

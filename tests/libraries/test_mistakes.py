"""A mistake in a library's layers, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run
from tests.libraries.models import MODELS

SCRIPT = f"""
    import fleetpipe

    fleetpipe.install()

    import paddle
    from paddle.distributed import fleet
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLMPipe

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {{"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}}
    strategy.pipeline_configs = {{"accumulate_steps": 4, "micro_batch_size": 2}}
    fleet.init(is_collective=True, strategy=strategy)
    model = LlamaForCausalLMPipe(LlamaConfig(**{MODELS["llama"].options}))
    for name, layer in model.named_sublayers():
        if name == "3.mlp.down_proj":
            layer.weight = layer.create_parameter([100, 64])
    pipe = fleet.distributed_model(model)
    adamw = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    tokens = paddle.randint(0, 96, [8, 17])
    pipe.train_batch([tokens[:, :-1], tokens[:, 1:]], fleet.distributed_optimizer(adamw))
"""

#: The line that quotes Paddle goes on with a place in its sources.
MESSAGE = """\
fleetpipe.errors.BoundaryError: layer 3 (LlamaDecoderLayerPipe): its mlp.down_proj cannot take \
what the layer gives it
  where: rank 1, operation F1.0 (stage 1, micro-batch 0)
  expected: what Linear(in_features=100, out_features=64, dtype=float32) takes
  got: Tensor of float32[2, 16, 128]; the layer itself was given Tensor of \
float32[2, 16, 64], from layer 2 (LlamaDecoderLayerPipe)
  likely cause: ValueError: [Hint: Expected K_lhs == K_rhs, but received K_lhs:128 != K_rhs:100.]
  what to do: change mlp.down_proj of layer 3, or what stands before it there, so that they fit
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [None, 2])
def test_a_wrong_shape_in_a_layer_is_reported(tmp_path: Path, processes: int | None) -> None:
    done = run(SCRIPT, processes, folder=tmp_path, timeout=120, check=False)
    assert done.returncode != 0
    for line in MESSAGE.splitlines():
        assert line in done.logs[-1]

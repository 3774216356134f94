"""A mistake in a library's layers, and what is said of it: the page shows the very words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import ROOT, run
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [None, 2])
def test_a_wrong_shape_in_a_layer_is_told_as_the_page_says(
    tmp_path: Path, processes: int | None
) -> None:
    done = run(SCRIPT, processes, folder=tmp_path, timeout=120, check=False)
    assert done.returncode != 0
    page = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
    pattern = r"```text\n(fleetpipe\.errors\.BoundaryError: .*?)\n```"
    (message,) = re.findall(pattern, page, re.DOTALL)
    # The line that quotes Paddle names a line of its sources.
    for line in message.splitlines():
        assert line.partition(" (at ")[0] in done.logs[-1]

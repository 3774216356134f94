"""A head in parts is one parameter in a checkpoint, on however many ranks it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.dygraph import VocabularyEmbedding, VocabularyHead, VocabularyLoss
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import job, pipeline

VOCABULARY, HIDDEN = 11, 8


def entries(tied: bool) -> list[Any]:
    blocks = [LayerDesc(nn.Linear, HIDDEN, HIDDEN) for _ in range(3)]
    if tied:
        head = VocabularyHead(HIDDEN, VOCABULARY, tied="words")
        return [VocabularyEmbedding("words", HIDDEN, VOCABULARY), *blocks, head]
    head = VocabularyHead(HIDDEN, VOCABULARY, bias_attr=None)
    return [LayerDesc(nn.Embedding, VOCABULARY, HIDDEN), *blocks, head]


def objects_of(model: Any) -> dict[str, Any]:
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    return {"model": model, "optimizer": fleet.distributed_optimizer(adam)}


def tensors(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_two_ranks_goes_to_four_and_to_one(tied: bool, tmp_path: Path) -> None:
    tokens, labels = (
        paddle.to_tensor(np.random.default_rng(seed).integers(0, VOCABULARY, (8, 3)))
        for seed in range(2)
    )
    losses, written = [], []
    for ranks, source in ((2, None), (4, 2), (1, 4), (2, 1)):
        with job(ranks, 4):
            model = pipeline(entries(tied), loss_fn=VocabularyLoss())
            objects = objects_of(model)
            if source is None:
                model.train_batch([tokens, labels], objects["optimizer"])
            else:
                fleetpipe.CheckpointManager(tmp_path / str(source)).restore(**objects)
            folder = tmp_path / (str(ranks) if source != 1 else "again")
            fleetpipe.CheckpointManager(folder).save(1, **objects)
            written.append(tensors(folder))
            losses.append(float(model.train_batch([tokens, labels], objects["optimizer"])))
    assert written[0]
    assert all(one == written[0] for one in written)
    assert losses[0] == losses[-1]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_a_model_of_one_process_takes_the_checkpoint_of_another_number(tmp_path: Path) -> None:
    with job(4, 4):
        model = pipeline(entries(tied=False), loss_fn=VocabularyLoss())
        fleetpipe.CheckpointManager(tmp_path).save(1, model=model)
        weights = [w for n, w in model.layers.full_state_dict().items() if w.shape[-1] == HIDDEN]
    with job(2, 4):
        single = pipeline(entries(tied=False), loss_fn=VocabularyLoss()).layers.single_model()
    fleetpipe.load_single(single, tmp_path)
    loaded = [w for w in single.parameters() if w.shape[-1] == HIDDEN]
    assert [w.shape[0] for w in loaded[-2:]] == [5, 6]
    expected = paddle.concat(weights[-4:])
    assert paddle.concat(loaded[-2:]).numpy().tobytes() == expected.numpy().tobytes()

"""A head in parts is one parameter in a checkpoint, on however many ranks it is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.dygraph import VocabularyEmbedding, VocabularyHead, VocabularyLoss
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import bits, job, pipeline

VOCABULARY, HIDDEN = 11, 8
#: Of the head's weights, tied or not.
NAMES = {False: "4.weight", True: "shared_layers.words.weight"}


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
        expected = model.layers.full_state_dict()["4.weight"]
    with job(2, 4):
        single = pipeline(entries(tied=False), loss_fn=VocabularyLoss()).layers.single_model()
    fleetpipe.load_single(single, tmp_path)
    loaded = [single.state_dict()[f"{number}.weight"] for number in (4, 5)]
    assert [w.shape[0] for w in loaded] == [5, 6]
    assert paddle.concat(loaded).numpy().tobytes() == expected.numpy().tobytes()


def saved(ranks: int, load: str, tied: bool, folder: str) -> dict[str, bytes]:
    """Loads what others have saved in a folder, or trains; saves it, and returns the whole."""
    tokens = paddle.to_tensor(np.random.default_rng(0).integers(0, VOCABULARY, (8, 3)))
    with job(ranks, 4):
        network = PipelineLayer(entries(tied), num_stages=ranks)
        model = fleetpipe.Model(network)
        adam = paddle.optimizer.AdamW(0.1, parameters=network.parameters())
        model.prepare(adam, VocabularyLoss())
        manager = fleetpipe.CheckpointManager(f"{folder}/run")
        if load == "train":
            model.train_batch([tokens], [tokens])
            manager.save(1, model=model.pipeline, optimizer=model.optimizer)
        elif load == "dict":
            network.set_dict(paddle.load(f"{folder}/2.pdparams"))
        elif load == "folder":
            network.set_state_dir(f"{folder}/2")
        elif load == "run":
            manager.restore(model=model.pipeline, optimizer=model.optimizer)
        elif load == "file":
            model.load(f"{folder}/2")
        else:
            network.load_from(paddle.load(f"{folder}/1.pdparams"))
            single = network.single_model()
            single.load_dict(network.full_state_dict())
            network.load_from(single)
        network.save_state_dict(f"{folder}/{ranks}")
        model.save(f"{folder}/{ranks}")
        state = network.full_state_dict()
        assert state[NAMES[tied]].shape == [VOCABULARY, HIDDEN]
        return bits(state)


@pytest.mark.parametrize("tied", [False, True])
def test_files_have_the_whole_head_and_go_to_any_number_of_ranks(
    tied: bool, tmp_path: Path, on_ranks: Callable[..., Any]
) -> None:
    first, second = on_ranks(saved, 2, 2, "train", tied, str(tmp_path))
    assert first == second
    for ranks, load in ((4, "dict"), (3, "folder"), (1, "run"), (1, "file"), (3, "source")):
        assert saved(ranks, load, tied, str(tmp_path)) == first, load
    two, one = (
        {key: paddle.load(str(tmp_path / f"{ranks}.{key}")) for key in ("pdparams", "pdopt")}
        for ranks in (2, 1)
    )
    assert [*two["pdparams"]] == [*one["pdparams"]]
    assert bits(two["pdopt"]) == bits(one["pdopt"])
    layers = {path.name for path in (tmp_path / "2").glob("layer_*")}
    assert layers == {f"layer_0{n}-tensor_00-model_states.pdparams" for n in range(5 - tied)}
    for path in layers:
        two, one = (paddle.load(str(tmp_path / ranks / path)) for ranks in "21")
        assert bits(two) == bits(one)

"""What parity, plans, Fleet's files and the optimizer's shards make of a head in parts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import paddle
import pytest

from fleetpipe import parity
from fleetpipe.contrib.vocabulary import EmbeddingInParts, VocabularyEmbedding
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.dygraph.optimizer.replicas import owners
from fleetpipe.dygraph.state import files
from fleetpipe.dygraph.state.files import LayerInParts
from fleetpipe.errors import ConfigError
from fleetpipe.fleet_files.manifest import LayerFile, Writer
from fleetpipe.profiling import LayerCost, PipelinePlan, Profile, plan
from tests.dygraph.observe.test_profile import M, names
from tests.dygraph.optimizer.test_shards import SHAPES, Layers
from tests.parity.test_session import compared
from tests.pipelines import batch, bits, job, mlp_layers, pipeline, sgd


def test_a_rank_reads_its_part_of_a_head_and_never_the_whole(tmp_path: Path) -> None:
    part = VocabularyHead(64, 32768).layers(8)[2].build_layer()
    first, last = part.rows
    numbers = np.random.default_rng(0).standard_normal((32768, 64)).astype("float32")
    place = LayerFile(3)
    state = {"weight": paddle.to_tensor(numbers)}
    files.save(tmp_path, {place: state}, 0, Writer("run/1", 0, 1))
    tracemalloc.start()
    try:
        files.load(tmp_path, {place: LayerInParts({"weight": [part.weight]})}, 0, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert part.weight.numpy().tobytes() == numbers[first:last].tobytes()
    assert peak < numbers.nbytes / 2


def test_parts_of_an_embedding_have_one_owner_so_that_a_checkpoint_can_join_their_states() -> None:
    embedding = EmbeddingInParts(4, VocabularyEmbedding("key", 4, 6).parts(3))
    found = owners([*embedding.parameters(), *Layers(SHAPES).parameters()], 2)
    assert len({found[id(part)] for part in embedding.parameters()}) == 1
    assert {*found.values()} == {0, 1}


def test_a_head_in_parts_has_the_bits_of_its_single_model() -> None:
    with job(3):
        model = pipeline([*mlp_layers()[:-1], VocabularyHead(8, 4)], loss_fn=VocabularyLoss())
        report = compared(model, sgd(model))
        session = parity.begin(model, sgd(model))
        session.eval_batch(batch(), compute_loss=True)
    assert report.bit_exact, report.verdict()
    assert session.report.passed, session.report.verdict()


def test_a_plan_cuts_what_stands_before_a_head() -> None:
    layers = [*mlp_layers()[:-1], VocabularyHead(8, 4)]
    body = [
        LayerCost(name, 1.0 + 3 * (i == 0), 2.0, output=8) for i, name in enumerate(names()[:-1])
    ]
    parts = [LayerCost("VocabularyPart", 5.0, 10.0, output=4) for _ in range(2)]
    profile = Profile((*body, *parts, LayerCost("vocabulary_loss", 0.1, 0.1)))
    made = plan(profile, 2, M)
    assert made.partition.boundaries == (0, 3, 6, 7, 8, 9)
    assert made.schedule.placement.name == "loop+head"
    assert plan(profile, 2, M, search=()).schedule.name == "1F1B"
    assert PipelinePlan.loads(made.dumps()) == made
    with pytest.raises(ConfigError, match="2 ranks, one for each part"):
        plan(profile, 3, M)
    with job(2, micro_batches=M):
        states = []
        for options in ({"plan": made}, {}):
            model = pipeline(layers, loss_fn=VocabularyLoss(), **options)
            model.train_batch(batch(M), sgd(model))
            states.append(bits(model.layers.full_state_dict()))
        assert states[0] == states[1]

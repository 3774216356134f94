"""A head in parts in a captured model, in parity, plans, Fleet's files and optimizer's shards."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.contrib.vocabulary import EmbeddingInParts, VocabularyEmbedding
from fleetpipe.contrib.vocabulary.captured import HeadInParts
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.dygraph.optimizer.replicas import assign_owners
from fleetpipe.dygraph.state import files
from fleetpipe.dygraph.state.files import LayerInParts
from fleetpipe.errors import CaptureError, ConfigError
from fleetpipe.fleet_files.manifest import LayerFile, Writer
from fleetpipe.paddle_api.tensor import has_memory
from fleetpipe.profiling import LayerCost, PipelinePlan, Profile, plan
from tests.capture.models import WIDTH, WORDS, tokens
from tests.dygraph.observe.test_profile import M, names
from tests.dygraph.optimizer.test_shards import SHAPES, Layers
from tests.pipelines import batch, bits, job, mlp_layers, pipeline, sgd

LABELS = tokens(8, seed=1)


class Model(nn.Layer):  # type: ignore[misc]
    """Blocks with a skip around all of them, and a product with the vocabulary at the end."""

    def __init__(self, bias: Any = None, scale: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.LayerList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias_attr=bias)
        self.scale = scale

    def forward(self, ids: Any) -> Any:
        x = first = self.table(ids)
        for block in self.blocks:
            x = paddle.tanh(block(x))
        logits = self.head(x + first)
        return logits if self.scale == 1 else logits * self.scale


def captured(model: Any, **options: Any) -> Any:
    usual = {"vocabulary_head": "head", "split_spec": ["blocks.2"], "loss_fn": VocabularyLoss()}
    return fleetpipe.pipeline(model, tokens(2), **{**usual, **options})


@pytest.mark.parametrize(("schedule", "bias"), [("1F1B", None), ("ZBH1", False)])
def test_it_trains_as_the_model_with_the_same_parts(schedule: str, bias: Any) -> None:
    with job(2, schedule=schedule):
        paddle.seed(1)
        plain = Model(bias)
        state = {name: tensor.numpy() for name, tensor in plain.state_dict().items()}
        pipe = captured(plain)
        assert pipe.proof is not None
        whole = [pipe.state_dict()[f"head.{part}.weight"] for part in range(2)]
        np.testing.assert_array_equal(np.concatenate(whole, 1), state["head.weight"])
        model = fleet.distributed_model(pipe)
        session = parity.begin(model, sgd(model))
        for seed in range(2):
            session.step([tokens(8, seed=seed), LABELS])
        assert session.report.passed, session.report.verdict()
        assert session.report.bit_exact
        losses = session.report.single_loss
    plain = Model(bias)
    plain.set_state_dict(state)
    loss = nn.CrossEntropyLoss()(plain(tokens(8)), LABELS)
    assert abs(float(loss) - losses[0]) < 1e-5


def test_its_parts_are_trained_as_its_linear_would_be() -> None:
    with job(2):
        plain = Model()
        plain.head.weight.stop_gradient = True
        plain.head.bias.need_clip = False
        plain.head.bias.optimize_attr["learning_rate"] = 0.0
        pipe = captured(plain)
        before = bits(pipe.full_state_dict())
        model = fleet.distributed_model(pipe)
        model.train_batch([tokens(8), LABELS], sgd(model))
        after = bits(pipe.full_state_dict())
        assert [n for n in after if after[n] == before[n]] == ["head.weight", "head.bias"]
        assert not any(part.bias.need_clip for part in plain.head.parts)


def test_a_lazy_models_head_is_drawn_part_by_part_as_its_linear_says() -> None:
    usual = paddle.get_default_dtype()
    paddle.set_default_dtype("float64")
    try:
        with paddle.LazyGuard():
            plain = Model(paddle.ParamAttr(initializer=nn.initializer.Constant(3.0)))
    finally:
        paddle.set_default_dtype(usual)
    head = HeadInParts(plain.head, "head", 2)
    assert not any(map(has_memory, head.parameters()))
    with job(2):
        state = captured(plain, verify=False).full_state_dict()
    assert (state["head.bias"].numpy() == 3.0).all()
    assert float(state["head.weight"].abs().max()) < (6 / (WIDTH + WORDS)) ** 0.5  # Xavier's
    assert {tensor.dtype for tensor in state.values()} == {paddle.float64}


def test_what_it_saves_is_the_plain_models(tmp_path: Any) -> None:
    """Checkpoints and files go to plain Paddle, and to another number of ranks."""
    with job(2):
        pipe = captured(Model(), verify=False)
        model = fleetpipe.Model(pipe)
        model.prepare(paddle.optimizer.Adam(0.1, parameters=pipe.parameters()), VocabularyLoss())
        model.train_batch([tokens(8)], [LABELS])
        model.save(str(tmp_path / "fit"))
        fleetpipe.CheckpointManager(tmp_path / "run").save(1, model=model.pipeline)
        pipe.save_state_dict(tmp_path / "layers")
        saved = bits(pipe.full_state_dict())
    plain = Model()
    plain.set_state_dict(paddle.load(str(tmp_path / "fit.pdparams")))
    assert bits(plain.state_dict()) == saved
    plain = Model()
    fleetpipe.load_single(plain, tmp_path / "run")
    assert bits(plain.state_dict()) == saved
    for ranks, cut in ((1, []), (3, ["blocks.0", "blocks.2"])):
        with job(ranks):
            pipe = captured(Model(), verify=False, split_spec=cut)
            pipe.set_state_dir(tmp_path / "layers")
            assert bits(pipe.full_state_dict()) == saved
            plain = Model()
            pipe.copy_to(plain)
            assert bits(plain.state_dict()) == saved
            single = pipe.single_model()
            for parameter in single.parameters():
                parameter.set_value(paddle.zeros_like(parameter))
            single.set_state_dict(pipe.full_state_dict())
            assert bits(single.state_dict()) == bits(pipe.state_dict())


def test_it_is_profiled_planned_and_trained_by_the_plan() -> None:
    data, states = [tokens(8), LABELS], []
    with job(2):
        paddle.seed(1)
        profile = fleet.distributed_model(captured(Model(), verify=False)).profile(data)
        names = [layer.name for layer in profile.layers]
        assert names[profile.body :] == ["VocabularyPart"] * 2 + ["vocabulary_loss"]
        head = profile.layers[profile.body]
        assert head.parameters == 4 * (WIDTH + 1) * (WORDS // 2)
        made = fleetpipe.plan(profile, 2, 4)
        assert made.schedule.placement.has_head
    recompute = tuple((first,) for first in made.partition.boundaries[:-1])
    again = PipelinePlan.loads(replace(made, recompute=recompute).dumps())
    for spec in (["blocks.2"], made, again):
        with job(2):
            paddle.seed(1)
            model = fleet.distributed_model(captured(Model(), split_spec=spec))
            optimizer = sgd(model)
            for _ in range(2):
                model.train_batch(data, optimizer)
            assert model.schedule == getattr(spec, "schedule", model.schedule)
            states.append(bits(model.layers.full_state_dict()))
    assert states[0] == states[1] == states[2]
    with job(2), pytest.raises(ConfigError, match="the number of layers differs"):
        captured(Model(), split_spec=made, vocabulary_head=None)
    with pytest.raises(ConfigError, match="2 ranks, one for each part"):
        fleetpipe.plan(profile, 3, 4)


def normed() -> Model:
    model = Model()
    nn.utils.weight_norm(model.head)
    return model


@pytest.mark.parametrize(
    ("model", "options", "schedule", "error", "message"),
    [
        (Model(scale=2.0), {}, "1F1B", CaptureError, "something with the logits"),
        (Model(), {"vocabulary_head": "haed"}, "1F1B", ConfigError, "head"),
        (Model(), {"vocabulary_head": "table"}, "1F1B", ConfigError, "an? Embedding"),
        (Model(), {}, "ZBV", ConfigError, "one of FThenB, 1F1B"),
        (normed(), {}, "1F1B", ConfigError, "'head' has hooks"),
        (Model(), {"loss_fn": nn.CrossEntropyLoss()}, "1F1B", ConfigError, "parts of the logits"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Any, options: Any, schedule: str, error: type[Exception], message: str
) -> None:
    layers = dict(model.named_sublayers())
    with job(2, schedule=schedule), pytest.raises(error, match=message):
        captured(model, **options)
    assert dict(model.named_sublayers()) == layers


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
    found = assign_owners([*embedding.parameters(), *Layers(SHAPES).parameters()], 2)
    assert len({found[id(part)] for part in embedding.parameters()}) == 1
    assert {*found.values()} == {0, 1}


def test_a_head_in_parts_has_the_bits_of_its_single_model() -> None:
    with job(3):
        model = pipeline([*mlp_layers()[:-1], VocabularyHead(8, 4)], loss_fn=VocabularyLoss())
        session = parity.begin(model, sgd(model))
        for step in range(2):
            session.step(batch(seed=step))
        session.eval_batch(batch(), compute_loss=True)
    assert session.report.bit_exact, session.report.verdict()
    assert session.report.passed


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

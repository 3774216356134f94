"""What ranks have of one model: chunks, their names and loading, and losses that are trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.errors import CheckpointError, ConfigError, PartitionError, ScheduleError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import (
    CLASSES,
    FEATURES,
    batch,
    bits,
    job,
    mlp_layers,
    model_in_job,
    pipeline,
    sgd,
    strategy,
)


def layers_of(model: Any) -> list[list[int]]:
    """By rank, the layers it would hold."""
    held: list[list[int]] = [[] for _ in range(model.placement.ranks)]
    for layer in range(len(model.partition.layers)):
        held[model.get_stage_from_index(layer)].append(layer)
    return held


@pytest.mark.parametrize(
    ("schedule", "chunks", "held"),
    [
        ("1F1B", None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("1F1B", 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("VPP", None, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("Interleaved1F1B", 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("ZBH1", None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("ZBH1", 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("ZBV", None, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("DualPipeV", 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_layers_stand_where_the_schedule_wants_them(
    schedule: str, chunks: int | None, held: list[list[int]]
) -> None:
    layers = [LayerDesc(nn.Linear, 6, 6) for _ in range(7)] + [LayerDesc(nn.Linear, 6, 4)]
    with model_in_job(2, 4, schedule, layers=layers, num_virtual_pipeline_stages=chunks) as model:
        assert layers_of(model.layers) == held
        assert model.layers.placement == model.schedule.placement
        assert model.layers.get_num_virtual_stages() == model.schedule.placement.chunks


@pytest.mark.parametrize("method", ["uniform", "balanced", "layer:Linear", [0, 2, 4, 6]])
def test_every_way_to_cut_makes_chunks(method: Any) -> None:
    with model_in_job(2, num_virtual_pipeline_stages=2, seg_method=method) as model:
        assert model.schedule.name == "Interleaved1F1B"
        assert len(model.layers.segment_parts) == 5
        model.train_batch(batch(), sgd(model))


def test_use_dualpipev_means_the_schedule() -> None:
    # Fleet's libraries ask for it with one chunk.
    for chunks in (None, 1, 2):
        options = {"use_dualpipev": True, "num_virtual_pipeline_stages": chunks}
        with model_in_job(2, **options) as model:
            assert model.schedule.name == "DualPipeV"
            assert model.layers.placement.name == "vee"


def test_chunks_are_there_to_look_at_and_to_call() -> None:
    with model_in_job(2) as wrapped:
        assert wrapped.layers.get_model_chunks() is None
        with pytest.raises(ConfigError, match="one chunk"):
            wrapped.layers(batch()[0], chunk_id=0)
    with model_in_job(2, 4, "ZBV") as wrapped:
        model = wrapped.layers
        chunks = model.get_model_chunks()
        # One process plays both ranks, so it has all four.
        assert (model._start_poss, model._end_poss) == ([0, 1, 3, 5], [1, 3, 5, 7])
        assert [len(chunk.get_run_function()) for chunk in chunks] == [1, 2, 2, 2]
        assert [name for chunk in chunks for name in chunk.state_dict()] == list(model.state_dict())
        assert list(chunks[1]) == chunks[1].run_function
        rows = [row.split()[:2] for row in model.stage_table().splitlines()[2:6]]
        assert rows == [["0", "0"], ["1", "1"], ["2", "1"], ["3", "0"]]
        value, _ = batch()
        expected = model(value).numpy().tobytes()
        middle = model.forward_function(0, 3)(value)
        assert model.forward_function(3, 7)(middle).numpy().tobytes() == expected
        assert model.forward_function(0, 0)(1, 2) == (1, 2)
        with pytest.raises(PermissionError, match="chunk_id"):
            chunks[0](value)
        for chunk in range(4):
            value = model(value, chunk_id=chunk)
        assert value.numpy().tobytes() == expected
        for number in (1, None):
            model.update_run_function(number)
            assert model.run_function == chunks[1].run_function
        for refused in (lambda: model(value, chunk_id=4), lambda: model.update_run_function(4)):
            with pytest.raises(ConfigError, match="no chunk 4"):
                refused()
        for nodes in (model.get_schedule_chunk, model.build_schedule_nodes):
            with pytest.raises(ConfigError, match="schedule_mode"):
                nodes(0, 1)


CHUNKS, DUALPIPEV = "num_virtual_pipeline_stages", {"use_dualpipev": True}


@pytest.mark.parametrize(
    ("ranks", "schedule", "options", "error", "words"),
    [
        (2, "ZBV", {CHUNKS: 1}, ConfigError, rf"(?=(.|\n)*{CHUNKS}=1)(.|\n)*chunks=2"),
        (2, "DualPipeV", {CHUNKS: 3}, ConfigError, rf"(?=(.|\n)*{CHUNKS}=3)(.|\n)*chunks=2"),
        *((2, "1F1B", {CHUNKS: number}, ConfigError, "chunks") for number in (0, -1, 1.5, True)),
        (2, "ZBH2", {CHUNKS: 2}, ConfigError, "ZBH2"),
        (2, "ZBV", DUALPIPEV, ConfigError, "use_dualpipev"),
        (2, "1F1B", {**DUALPIPEV, CHUNKS: 3}, ConfigError, "use_dualpipev"),
        (2, "ZBV", {"memory_cap": 1}, ScheduleError, "cap"),
        (4, "ZBV", {}, PartitionError, r"7 layers(.|\n)*8 stages"),
    ],
)
def test_chunks_that_cannot_be_are_refused(
    ranks: int, schedule: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), model_in_job(ranks, 4, schedule, **options):
        pass


def test_a_schedule_that_needs_another_placement_is_refused() -> None:
    with job(2, 4, "ZBV"):
        topology = fleet.get_hybrid_communicate_group().topology()
        layers = PipelineLayer(mlp_layers(), topology=topology, loss_fn=nn.CrossEntropyLoss())
        fleet.init(is_collective=True, strategy=strategy(pp=2))
        with pytest.raises(ConfigError, match="placed") as caught:
            fleet.distributed_model(layers)
    assert "a vee of 2 ranks with 2 chunks" in str(caught.value)


def test_without_a_job_chunks_make_a_loop_and_the_topology_is_of_data_and_pipe() -> None:
    fleet.shutdown()
    model = PipelineLayer(mlp_layers(), num_stages=2, num_virtual_pipeline_stages=2)
    assert (model.placement.name, model.placement.stages) == ("loop", 4)
    assert [model._topo.get_dim(axis) for axis in ("pipe", "data")] == [2, 1]


class Tasks(nn.Layer):
    """Weighs two losses by a trained weight of each, and centres them by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([2])
        self.register_buffer("centre", paddle.zeros([CLASSES]))

    def forward(self, output: Any, label: Any) -> Any:
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        square = (output - self.centre).square().mean()
        loss = nn.functional.cross_entropy(output, label)
        return loss * paddle.exp(-self.weight[0]) + square * self.weight[1].exp()


def trained_loss(ranks: int, **options: Any) -> list[dict[str, bytes]]:
    """The state of a loss after each of three steps."""
    with job(ranks, 2, **options):
        paddle.seed(0)
        loss = Tasks()
        model = pipeline(loss_fn=loss)
        parameters = [*model.parameters(), *loss.parameters()]
        adam = fleet.distributed_optimizer(paddle.optimizer.Adam(0.1, parameters=parameters))
        states = []
        for step in range(3):
            model.train_batch(batch(2, step), adam)
            states.append(bits(loss.state_dict()))
        return states


def measured() -> Any:
    """Shapes, a norm, and the loss of a batch after an initialization over all parameters."""
    with model_in_job(2, 2) as model:
        pipe = model.layers
        largest = pipe.whole_parameters(lambda parameter: float(parameter.abs().max()))
        shapes = pipe.whole_parameters()
        paddle.seed(3)
        drawn = {name: 0.1 * paddle.randn(shape) for name, shape in shapes.items()}
        pipe.load_from({**pipe.full_state_dict(), **drawn})
        loss = model.train_batch(batch(2), sgd(model))
        return [*shapes.items()], max(largest.values()), loss.numpy().tobytes()


def in_two_pipelines(seg_method: list[int], trains: bool) -> str:
    """What is said of built layers that stand alone, and behind others, on two ranks."""
    body = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for parameter in (p for layer in body for p in layer.parameters()):
        parameter.stop_gradient = not trains
    # The wrapper is needed while the other is made.
    layers = [LayerDesc(nn.Linear, 8, 8), *body]
    with model_in_job(2, 2, layers=layers, seg_method=seg_method) as first:
        try:
            pipeline([*body, LayerDesc(nn.Linear, 8, CLASSES)], seg_method=[0, 1])
        except ConfigError as error:
            return str(error).splitlines()[0]
        return f"as {type(first).__name__}"


def program() -> list[Any]:
    """What two ranks, or one process that plays them, have of these."""
    pairs = (([0, 1], True), ([0, 2], True), ([0, 1], False))
    return [trained_loss(2), measured(), *(in_two_pipelines(*pair) for pair in pairs)]


def test_ranks_have_the_state_of_a_trained_loss_and_figures_of_all_parameters(
    on_ranks: Any,
) -> None:
    losses, figures, *alone = program()
    assert losses[0] != losses[2]
    assert [name for name, _ in figures[0]][:2] == ["0.weight", "0.bias"]
    assert figures[0][0][1] == [FEATURES, 8]
    # Two pipelines may have one built layer on the same rank, or untrained.
    taken = "as PipelineParallel"
    refused = "a built layer stands in two pipelines, which have it on different ranks"
    assert alone == [taken] * 3
    assert on_ranks(program, 2) == [[losses, figures, refused, taken, taken]] * 2
    assert on_ranks(partial(trained_loss, 2, dp=2), 4) == [losses] * 4


class Normed(nn.Layer):
    """A Linear whose weight is of a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.weight_norm(nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_the_whole_state_names_what_was_taken_out_of_a_layer() -> None:
    with model_in_job(2, 2, layers=[LayerDesc(Normed), *mlp_layers()]) as model:
        pipe = model.layers
        before = model.predict_batch(batch(2)[0])
        single = pipe.single_model()
        (normed,) = (part for part in pipe.sublayers() if isinstance(part, Normed))
        nn.utils.remove_weight_norm(normed.inner)
        assert np.allclose(before, model.predict_batch(batch(2)[0]), atol=1e-6)
        for save in (pipe.full_state_dict, lambda: pipe.copy_to(single)):
            with pytest.raises(CheckpointError, match=r"0\.inner\.weight_v, 0\.inner\.weight_g"):
                save()

"""A checkpoint of any layout is read by any other, and training goes on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, log, parity
from fleetpipe.checkpoint.files import manifest
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import MODELS
from tests.fixtures import LogCapture
from tests.pipelines import adam, bits, job, pipeline

BEFORE, AFTER = range(1, 3), range(3, 5)


class Layout(NamedTuple):
    """How one process plays the ranks of a pipeline."""

    pp: int = 1
    chunks: int | None = None
    schedule: str = "1F1B"


LAYOUTS = {
    "single": Layout(),
    "pp 2": Layout(2),
    "pp 4": Layout(4),
    "v 2": Layout(2, 2, "Interleaved1F1B"),
    "ZBV": Layout(2, 2, "ZBV"),
}


class Run:
    """A model that is trained, and all that decides its next bit."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        paddle.seed(1)
        options = {} if layout.chunks is None else {"num_virtual_pipeline_stages": layout.chunks}
        self.model = pipeline(MODELS["mlp"].layers(), loss_fn=MODELS["mlp"].loss, **options)
        self.rate = paddle.optimizer.lr.StepDecay(0.01, step_size=2)
        adamw = paddle.optimizer.AdamW(self.rate, parameters=self.model.parameters())
        self.optimizer = fleet.distributed_optimizer(adamw)
        self.manager = fleetpipe.CheckpointManager(folder)
        self.objects = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.rate}

    def train(self, steps: range) -> list[bytes]:
        losses = [
            self.model.train_batch(MODELS["mlp"].batch(4, step), self.optimizer, self.rate)
            for step in steps
        ]
        return [loss.numpy().tobytes() for loss in losses]

    def end(self) -> dict[str, Any]:
        """The bits of the parameters, and what is drawn next."""
        return {**bits(self.model.layers.own_state()), "drawn": paddle.rand([4]).numpy().tobytes()}


def hash_of(folder: Path) -> str:
    """The hash of the model that the manifest of the one step in a folder has."""
    return manifest.read(next(folder.glob("step-*"))).model_hash


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By layout: the folder that it saved in, and how the run went on there."""
    found = {}
    for name, layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("run")
        with job(layout.pp, 4, layout.schedule):
            run = Run(layout, folder)
            run.train(BEFORE)
            run.manager.save(2, **run.objects, extra={"seen": [1, 2.5]})
            found[name] = folder, (run.train(AFTER), run.end())
    return found


@pytest.mark.parametrize("reader", LAYOUTS)
def test_each_layout_goes_on_from_each(reader: str, written: Any) -> None:
    layout = LAYOUTS[reader]
    for writer, (folder, went_on) in written.items():
        with job(layout.pp, 4, layout.schedule):
            run = Run(layout, folder)
            paddle.seed(2)
            restored = run.manager.restore(**run.objects)
            assert fleetpipe.model_hash(run.model) == hash_of(folder)
            assert (restored.step, restored.extra) == (2, {"seen": [1, 2.5]})
            assert (run.train(AFTER), run.end()) == went_on, writer


def test_all_layouts_write_the_same_bytes(written: Any) -> None:
    contents = [
        {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}
        for folder, _ in written.values()
    ]
    assert sorted(contents[0]) == [
        "model-00001-of-00001.safetensors",
        "optimizer-00001-of-00001.safetensors",
    ]
    assert all(other == contents[0] for other in contents)
    assert len({hash_of(folder) for folder, _ in written.values()}) == 1


class Plain(paddle.nn.Layer):
    """The same layers in a class of its own, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for layer in MODELS["mlp"].layers() if hasattr(layer, "build_layer")]
        for index, layer in enumerate(layers):
            self.add_sublayer(f"part{index}", layer.build_layer())


@pytest.mark.parametrize("writer", LAYOUTS)
def test_a_plain_model_loads_each_and_is_loaded(writer: str, written: Any, tmp_path: Path) -> None:
    folder, _ = written[writer]
    layout = LAYOUTS[writer]
    plain = Plain()
    adamw = paddle.optimizer.AdamW(0.5, parameters=plain.parameters())
    assert fleetpipe.load_single(plain, folder, optimizer=adamw) == 2
    # A process without a job saves it under names of its own, and the pipeline goes by the order.
    fleetpipe.CheckpointManager(tmp_path).save(5, model=plain, optimizer=adamw)
    ended = []
    for home, step, chosen in [(folder, 2, None), (tmp_path, 5, ("model", "optimizer"))]:
        with job(layout.pp, 4, layout.schedule):
            run = Run(layout, home)
            assert run.manager.restore(**run.objects, only=chosen).step == step
            whole = run.model.layers.full_state_dict()
            assert [*bits(whole).values()] == [*bits(plain.state_dict()).values()]
            run.rate.set_state_dict({"last_epoch": 2, "last_lr": 0.001})
            ended.append((run.train(AFTER), bits(run.model.layers.own_state())))
    assert ended[0] == ended[1]


class Memory(nn.Layer):
    """Adds what it remembers of the micro-batches before, in a buffer of one of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        if kind == "none":
            self.register_buffer("memory", None)
        if kind == "grows":
            self.register_buffer("memory", paddle.zeros([1, 4]))

    def forward(self, value: Any) -> Any:
        hidden = self.linear(value)
        if self.kind == "table":
            if not hasattr(self, "table"):
                self.register_buffer("table", paddle.arange(4.0), persistable=False)
            return hidden + self.table
        if self.kind == "registered" and not hasattr(self, "memory"):
            self.register_buffer("memory", paddle.zeros([1, 4]))
        seen = hidden.detach() if self.memory is None else self.memory
        output = hidden + 0.5 * seen.mean(axis=0)
        rows = paddle.concat([seen, hidden.detach()]) if self.kind == "grows" else seen + 1
        self.memory = rows[-6:]
        return output


@pytest.mark.parametrize("given", ["described", "built"])
@pytest.mark.parametrize("kind", ["none", "registered", "grows", "table"])
def test_buffers_that_forwards_make_or_enlarge_come_back(
    kind: str, given: str, tmp_path: Path, caplog: LogCapture
) -> None:
    def made() -> tuple[Any, Any]:
        paddle.seed(3)
        layers = [LayerDesc(Memory, kind), LayerDesc(nn.Linear, 4, 4)]
        if given == "built":
            layers = [layer.build_layer() for layer in layers]
        model = pipeline(layers, loss_fn=nn.MSELoss())
        return model, adam(model)

    def trained(model: Any, optimizer: Any, steps: range) -> list[float]:
        batches = [paddle.full([8, 4], step / 7.0) for step in steps]
        return [float(model.train_batch([b, b], optimizer)) for b in batches]

    manager = fleetpipe.CheckpointManager(tmp_path)
    with job(2, 4):
        model, optimizer = made()
        trained(model, optimizer, BEFORE)
        manager.save(2, model=model, optimizer=optimizer)
        log.once.cache_clear()
        went_on = trained(model, optimizer, AFTER), bits(model.layers.full_state_dict())
    assert ("leaves out 0.memory, which" in caplog.text) == (kind in ("none", "registered"))
    with job(2, 4):
        model, optimizer = made()
        manager.restore(model=model, optimizer=optimizer)
        again = trained(model, optimizer, AFTER), bits(model.layers.full_state_dict())
        assert again == went_on
    with job(2, 4):
        session = parity.begin(*made())
        for step in BEFORE:
            value = paddle.full([8, 4], step / 7.0)
            session.step([value, value])
        assert session.report.passed, session.report.verdict()


def test_parameters_that_a_model_was_given_later_are_refused_before_they_are_saved(
    tmp_path: Path,
) -> None:
    with job(2, 4):
        run = Run(Layout(2), tmp_path)
        layer = dict(run.model.layers.named_children())["0"]
        layer.adapter = layer.create_parameter([1])
        with pytest.raises(CheckpointError, match=r"got: 0\.adapter"):
            run.manager.save(1, **run.objects)
        assert run.manager.steps() == []

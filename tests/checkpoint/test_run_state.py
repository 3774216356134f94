"""What a script adds to a run comes back, and what it has changed of its objects is not lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.checkpoint.contents.attributes import Attributes
from fleetpipe.checkpoint.contents.objects import Objects, trees_for_rank
from fleetpipe.checkpoint.ranks import Part, RankCoordinates
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.fixtures import Call
from tests.pipelines import CLASSES, FEATURES, batch, model_in_job, pipeline, sgd


class Average:
    """An average of the weights that a rank has, by hand."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.updates = pipe, 0
        self.weights = {name: p.numpy() for name, p in pipe.named_parameters()}

    def update(self) -> None:
        self.updates += 1
        for name, parameter in self.pipe.named_parameters():
            self.weights[name] = 0.9 * self.weights[name] + 0.1 * parameter.numpy()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.weights = state["updates"], state["weights"]


def averaged(folder: Path, steps: int, steps_of_a_run: int = 6) -> list[Any]:
    """Goes on to a step; returns what the script has added to the run."""
    with model_in_job(2, micro_batches=2) as pipe:
        optimizer, ema = sgd(pipe), Average(pipe)
        last, seen = paddle.zeros([2]), np.zeros(steps_of_a_run)
        state: dict[str, Any] = {"ema": ema, "best": 9.0, "losses": [], "last": last, "seen": seen}
        manager = fleetpipe.CheckpointManager(folder, save_interval=3)
        run = fleetpipe.resume(pipe, optimizer, state=state, manager=manager)
        for step in run.steps(steps):
            loss = pipe.train_batch(batch(2, seed=step), optimizer)
            ema.update()
            last.set_value(paddle.full([2], float(loss)))
            seen[step] = float(loss)
            state["losses"].append(float(loss))
            state["best"] = min(state["best"], float(loss))
        bits = [value.tobytes() for value in ema.weights.values()]
        return [bits, ema.updates, state["best"], state["losses"], last.tolist(), seen.tolist()]


def test_what_a_script_adds_goes_on_on_each_rank(on_ranks: Call, tmp_path: Path) -> None:
    whole = on_ranks(averaged, 2, tmp_path / "whole", 6)
    assert whole[0][0] != whole[1][0]
    on_ranks(averaged, 2, tmp_path / "parts", 3)
    assert on_ranks(averaged, 2, tmp_path / "parts", 6) == whole
    with pytest.raises(CheckpointError, match=r"state\['ema'\] is another on each of the ranks"):
        averaged(tmp_path / "parts", 9)


def test_an_array_or_a_tensor_of_another_form_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(1, model=nn.Linear(2, 2), state={"a": np.ones(3), "b": paddle.ones([3])})
    model, a, b = nn.Linear(2, 2), np.zeros(3), paddle.zeros([3])
    begin = model.weight.numpy().tobytes()
    for name, other in (("a", np.zeros(1)), ("a", np.zeros(3, "int64")), ("b", paddle.zeros([1]))):
        with pytest.raises(CheckpointError, match=rf"state\['{name}'\] does not fit"):
            manager.restore(model=model, state={"a": a, "b": b, name: other})
    assert model.weight.numpy().tobytes() == begin
    manager.restore(model=model, state={"a": a, "b": b})
    assert (a.tolist(), b.tolist()) == ([1.0] * 3, [1.0] * 3)


def test_a_rank_takes_what_its_place_had_or_else_one_with_its_part_of_the_model() -> None:
    def place(replica: int, replicas: int, stages: int = 1) -> RankCoordinates:
        return RankCoordinates(replica=Part(replica, replicas), stages=Part(0, stages))

    places = [place(replica, 3) for replica in range(3)]
    trees = [{"ema": ["", replica]} for replica in range(3)]
    saved = {"places": [one.to_json() for one in places], "of_rank": [0, 1, 2], "states": trees}
    assert [trees_for_rank(saved, one) for one in places] == trees
    assert trees_for_rank(saved, place(1, 2)) == trees[0]
    with pytest.raises(CheckpointError, match="another on each of the ranks"):
        trees_for_rank(saved, place(1, 3, stages=2))


def test_all_ranks_check_the_same_files_whatever_some_add_alone() -> None:
    assert Objects(nn.Linear(2, 2)).groups() == Objects(nn.Linear(2, 2), state={}).groups()


@pytest.mark.parametrize("state", [3, {1: 2}, {"ema": object()}])
def test_what_cannot_be_saved_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state"):
        fleetpipe.CheckpointManager(tmp_path).save(1, model=nn.Linear(2, 2), state=state)


class Counting(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.shape = 0, None

    def forward(self, x: Any) -> Any:
        self.calls, self.shape = self.calls + 1, tuple(x.shape)
        return x / (1 + self.calls * self.scale)

    scale = 0.0


def dropout(pipe: Any) -> Any:
    return pipe.layers.owned_stages.functions[1]


def unfreeze(pipe: Any, _optimizer: Any) -> None:
    for parameter in pipe.parameters():
        parameter.stop_gradient = False


def halve(_layer: Any, _inputs: Any, output: Any) -> Any:
    return output / 2


#: A change of the model or the optimizer, and the name under which it is known.
CHANGES: list[tuple[Any, str]] = [
    (unfreeze, "0.bias.stop_gradient"),
    (lambda pipe, _: setattr(dropout(pipe), "p", 0.5), "1.p"),
    (lambda _, sgd: setattr(sgd.wrapped._grad_clip, "clip_norm", 0.01), "clip.0.clip_norm"),
    (lambda _, sgd: setattr(sgd.wrapped, "_momentum", 0.5), "optimizer._momentum"),
    (lambda pipe, _: dropout(pipe).eval(), "1.training"),
    (lambda pipe, _: setattr(dropout(pipe), "forward", lambda x: 2 * x), "1.forward"),
    (lambda pipe, _: dropout(pipe).register_forward_post_hook(halve), "1.hooks"),
]


def changed(
    folder: Path, change: Any, steps: int, again: bool = False, allow: str = "state:calls"
) -> Any:
    """Goes on to a step; the change is made in the second, and where it is made again."""
    layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(nn.Dropout, 0.1)]
    layers += [LayerDesc(Counting), LayerDesc(Counting), LayerDesc(nn.Linear, 8, CLASSES)]
    with model_in_job(2, micro_batches=2, layers=layers, allow=[allow]) as pipe:
        paddle.seed(3)
        pipe.layers.owned_stages.functions[0].bias.stop_gradient = True
        norm = nn.ClipGradByGlobalNorm(1.0)
        parameters = pipe.parameters()
        stepped = paddle.optimizer.Momentum(0.1, 0.9, parameters=parameters, grad_clip=norm)
        optimizer = fleet.distributed_optimizer(stepped)
        manager = fleetpipe.CheckpointManager(folder, save_interval=3)
        run = fleetpipe.resume(pipe, optimizer, state={}, manager=manager)
        for step in run.steps(steps):
            if step == 1 or (again and step == 3):
                change(pipe, optimizer)
            pipe.train_batch(batch(2, seed=step), optimizer)
            pipe.eval_batch(batch(2, seed=step))
        return fleetpipe.model_hash(pipe)


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_that_a_run_has_made_is_made_again_or_refused(
    change: Any, name: str, tmp_path: Path
) -> None:
    whole = changed(tmp_path / "whole", change, 5)
    changed(tmp_path / "parts", change, 3)
    with pytest.raises(ConfigError, match=f"{name} has changed in the run"):
        changed(tmp_path / "parts", change, 5)
    assert changed(tmp_path / "parts", change, 5, again=True) == whole
    np.testing.assert_equal(fleetpipe.CheckpointManager(tmp_path / "parts").steps(), [3])


class Mean:
    """A mean in an object, which no state dict has."""

    def __init__(self) -> None:
        self.value, self.calls = paddle.zeros([2]), {"all": 0}


class Keeps(nn.Layer):
    """Keeps something in an attribute, and changes it by a function."""

    def __init__(self, kept: Any, change: Any) -> None:
        super().__init__()
        self.kept, self.change = kept, change

    def forward(self, x: Any) -> Any:
        self.change(self.kept)
        return x


class CountsInClass(nn.Layer):
    calls = 0

    def forward(self, x: Any) -> Any:
        CountsInClass.calls += 1
        return x


def forget(memory: dict[str, Any]) -> None:
    memory["mean"] = memory["mean"] + 1


def grow(table: dict[int, Any]) -> None:
    table[len(table)] = paddle.ones([2])


def lengthen(tables: list[Any]) -> None:
    tables[0] = paddle.ones([tables[0].shape[0] + 1])


def average(mean: Mean) -> None:
    mean.value, mean.calls["all"] = mean.value + 1, mean.calls["all"] + 1


#: What a layer or a function keeps that no checkpoint has, and the names under which it shows; a
#: table that is made or made longer when it is first needed shows no change.
KEPT: list[tuple[Any, list[str]]] = [
    (Keeps({"mean": paddle.zeros([2])}, forget), ["0.kept['mean'][2]"]),
    (Keeps({"mean": np.zeros(2)}, forget), ["0.kept['mean'][2]"]),
    (Keeps(Mean(), average), ["0.kept.calls", "0.kept.value[2]"]),
    (Keeps(np.random.RandomState(0), np.random.RandomState.rand), ["0.kept"]),
    (Keeps(np.random.default_rng(0), np.random.Generator.random), ["0.kept"]),
    (Keeps(random.Random(0), random.Random.random), ["0.kept"]),
    (Keeps({1}, lambda kept: kept.add(len(kept) + 1)), ["0.kept"]),
    (
        Keeps([nn.Linear(1, 1)], lambda kept: kept[0].bias.add_(kept[0].bias + 1)),
        ["0.kept[0]['bias'][1]"],
    ),
    (CountsInClass(), ["0.calls"]),
    (Keeps({}, grow), []),
    (Keeps([paddle.ones([1])], lengthen), []),
]


@pytest.mark.parametrize(("function", "names"), KEPT)
def test_what_a_layer_keeps_outside_of_its_buffers_shows(function: Any, names: list[str]) -> None:
    with model_in_job(1, layers=[function, LayerDesc(nn.Linear, FEATURES, CLASSES)]) as pipe:
        attributes = Attributes(pipe.layers)
        before = attributes.now()
        with paddle.no_grad():
            pipe.layers.owned_stages.functions[0](paddle.ones([1]))
        after = attributes.now()
    assert sorted(n for n, text in before.items() if after.get(n, text) != text) == names


def test_variables_of_a_script_are_its_own() -> None:
    losses, last = [0.0], {"output": paddle.zeros([2])}

    def loss_that_notes(output: Any, label: Any) -> Any:
        loss = nn.functional.cross_entropy(output, label)
        losses.append(float(loss))
        last["output"] = output.detach()
        return loss

    with model_in_job(1, loss_fn=loss_that_notes) as pipe:
        attributes = Attributes(pipe.layers)
        before = attributes.now()
        pipe.train_batch(batch(), sgd(pipe))
        assert attributes.now() == before
    assert len(losses) > 1


def test_one_entry_allows_an_attribute_of_all_layers(tmp_path: Path) -> None:
    changed(tmp_path, print, 3)
    with pytest.raises(ConfigError, match=r"2.calls \(and 1 more calls\) has(?s:.*)'state:calls'"):
        changed(tmp_path, print, 5, allow="state:p")
    changed(tmp_path, print, 5)


def test_each_run_of_a_job_compares_its_own_model_and_optimizer(tmp_path: Path) -> None:
    with model_in_job(2, micro_batches=2) as pipe:
        for number, model in enumerate((pipe, pipe, pipeline())):
            optimizer = sgd(model)
            manager = fleetpipe.CheckpointManager(tmp_path / str(number))
            run = fleetpipe.resume(model, optimizer, manager=manager)
            for step in run.steps(1):
                model.train_batch(batch(2, seed=step), optimizer)
        with pytest.raises(ConfigError, match="another optimizer steps than"):
            model.train_batch(batch(2), sgd(model))

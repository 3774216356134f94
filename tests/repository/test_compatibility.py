"""docs/compatibility.md says what is so: every row is compared with the code, on both Paddles."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
import pytest
from paddle.distributed import fleet as theirs

from fleetpipe import fleet
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel import PipelineLayer
from fleetpipe.fleet.overlay import OVERLAYS
from fleetpipe.launch.substitution import in_place_of_paddles
from fleetpipe.mesh.axes import AXES
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.static import StaticOptimizer
from tests import paddle_names
from tests.check_types import sources, tree
from tests.fixtures import Patch
from tests.launching import ROOT
from tests.pipelines import batch, bits, job, mlp_layers, pipeline, sgd
from tests.repository.tables import STATUSES, Row, rows

pytestmark = pytest.mark.every_row

VERSION = paddle.__version__
ROWS = [row for row in rows() if row.is_there_on(VERSION)]
OURS, PADDLES = "fleetpipe.fleet", "paddle.distributed.fleet"
META = f"{OURS}.meta_parallel"


#: What a status can mean for each kind of table.
WORKS, ACCEPTED, PADDLES_OWN, REFUSED = STATUSES
ALLOWED = {
    "name in": {WORKS, PADDLES_OWN, REFUSED},
    "member of": {WORKS, PADDLES_OWN, REFUSED},
    "argument of": {WORKS, ACCEPTED, PADDLES_OWN, REFUSED},
    "attribute of": {WORKS, PADDLES_OWN},
    "option of": {WORKS, ACCEPTED, REFUSED},
    "value of": {WORKS, REFUSED},
    "switch of": {WORKS, REFUSED},
    "field of": {PADDLES_OWN, REFUSED},
    "key of": {REFUSED},
    "environment variable": {WORKS, ACCEPTED},
}


def of(kind: str) -> Any:
    """Parametrizes a test with the rows of a kind of table."""
    chosen = [row for row in ROWS if row.kind == kind]
    assert chosen, f"the page has no table of {kind!r}"
    return pytest.mark.parametrize("row", chosen, ids=lambda row: f"{row.subject}.{row.name}")


def find(path: str) -> Any:
    """Returns what a dotted path names: a module, or a name in one, or in a class."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(find(module), name) if module else importlib.import_module(path)
    except AttributeError:
        return importlib.import_module(path)


def missing(path: str) -> bool:
    try:
        find(path)
    except (AttributeError, ModuleNotFoundError):
        return True
    return False


def advice(row: Row) -> list[str]:
    """Returns what a refusal must mention: the names in backticks after "use" or "set it to"."""
    found = re.findall("`(.+?)`", re.split("use |set it to ", row.note, maxsplit=1)[-1])
    assert found, f"{row}: the page does not say what to use instead"
    return [name.strip(":") for name in found]


def assert_refused(row: Row, provoke: Callable[[], object]) -> None:
    with pytest.raises(FleetPipeError) as caught:
        provoke()
    assert isinstance(caught.value, ValueError)
    for name in advice(row):
        assert name in str(caught.value)


def test_every_status_means_something_in_its_table_and_no_name_comes_twice() -> None:
    assert {row.kind for row in rows()} == set(ALLOWED)
    assert [row for row in rows() if row.status not in ALLOWED[row.kind]] == []
    names = [str(row) for row in rows()]
    assert sorted(set(names)) == sorted(names)


def test_what_one_version_lacks_is_not_there() -> None:
    absent = [row for row in rows() if not row.is_there_on(VERSION) and row.kind == "name in"]
    assert absent
    for row in absent:
        assert missing(f"{row.subject}.{row.name}"), row


@of("name in")
def test_a_name_is_fleetpipes_or_paddles_very_object(row: Row) -> None:
    path = f"{row.subject}.{row.name}"
    same = path.replace(OURS, PADDLES)
    described = row.subject == META and hasattr(find(path), "build_layer")
    if described:
        build = functools.partial(_list_with, find(path))
        assert_refused(row, build) if row.status == REFUSED else build()
    if row.status == REFUSED and not path.startswith(META):
        if device_kind() == "cpu":
            with in_place_of_paddles():
                assert_refused(row, lambda: find(path)("model", "optimizer", "os"))
    elif row.status == REFUSED:
        assert described
        assert find(path) is find(same)
    elif row.status == WORKS and not path.startswith(OURS):
        stock = {name: getattr(find(path), name) for name in dir(find(path))}
        with in_place_of_paddles():
            changed = [name for name in stock if getattr(find(path), name) is not stock[name]]
        assert changed or device_kind() == "gpu"
    elif row.status == WORKS:
        on_gpu = "on GPU they are Paddle's own" in row.note and device_kind() == "gpu"
        assert on_gpu or missing(same) or find(path) is not find(same)
        assert find(path) is not None
    elif not missing(same):
        assert find(path) is find(same)
    else:
        assert f"on {VERSION}, which lacks" in row.note
        assert find(path) is not None


def test_a_module_of_fleetpipes_is_there_by_attribute_too() -> None:
    assert "meta_parallel.parallel_layers.pp_layers" in OVERLAYS
    for name in [META, *(f"{OURS}.{path}" for path in OVERLAYS)]:
        assert find(name) is importlib.import_module(name), name


def _list_with(description: Any) -> None:
    tied = ("key", paddle.nn.Linear, None, "weight")
    plain = (paddle.nn.Linear,)
    shares = "shared_weight_attr" in inspect.signature(description).parameters
    entry = description(*(tied if shares else plain), 4, 4)
    with job(2):
        PipelineLayer([entry, paddle.nn.Linear(4, 4)], num_stages=2)


@of("argument of")
def test_an_argument_is_taken_and_used_as_the_page_says(row: Row) -> None:
    function = find(row.subject)
    assert function.__module__.startswith("fleetpipe.") == (row.status != PADDLES_OWN)
    function = function.__init__ if inspect.isclass(function) else function
    assert row.name in inspect.signature(function).parameters
    if row.status in (WORKS, ACCEPTED):
        assert _uses(function, row.name) == (row.status == WORKS)
    if row.status == REFUSED:
        assert find(row.subject) is StaticOptimizer.minimize
        minimize = functools.partial(_static_optimizer().minimize, None)
        assert_refused(row, lambda: minimize(**{row.name: ["x"]}))


def _uses(function: Any, argument: str) -> bool:
    """Whether a function does more with an argument than to refuse it or to keep it as it is."""
    (definition,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body
    kept = {
        id(name)
        for node in ast.walk(definition)
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
        for name in ast.walk(node.test)
    }
    kept |= {
        id(node.value)
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == argument
    }
    return any(
        isinstance(node, ast.Name) and node.id == argument and id(node) not in kept
        for node in ast.walk(definition)
        if not isinstance(getattr(node, "ctx", None), ast.Store)
    )


@contextmanager
def _sample() -> Iterator[Any]:
    """Yields a trained wrapper with two chunks on each of two ranks."""
    with job(2, schedule="Interleaved1F1B"):
        model = pipeline()
        model.train_batch(batch(), sgd(model))
        yield model


@of("member of")
def test_a_member_is_defined_where_the_page_says(row: Row) -> None:
    owner = find(row.subject)
    if row.status == REFUSED:
        with _sample() as model:
            instance = model.layers if owner is PipelineLayer else model
            assert_refused(row, lambda: _call(getattr(instance, row.name)))
        return
    defined = next(cls for cls in owner.__mro__ if row.name in vars(cls))
    assert getattr(vars(defined)[row.name], "__annotations__", {}).get("return") != "NoReturn"
    expected = "fleetpipe." if row.status == WORKS else "paddle."
    assert defined.__module__.startswith(expected)


def _call(method: Any) -> None:
    method(*[0] * len(inspect.signature(method).parameters))


@of("attribute of")
def test_an_attribute_is_there(row: Row) -> None:
    origin = "fleetpipe." if row.status == WORKS else "paddle."
    assert find(row.subject).__module__.startswith(origin)
    with _sample() as model:
        instances = [model, model.layers, fleet.DistributedStrategy()]
        instances.append(fleet.get_hybrid_communicate_group())
        instance = next(one for one in instances if isinstance(one, find(row.subject)))
        assert hasattr(instance, row.name)


@functools.cache
def words_of_the_sources() -> frozenset[str]:
    """Returns the names, attributes and strings of the package, without its docstrings."""
    found: set[str] = set()
    for file in sources(ROOT):
        says = tree(file)
        texts = {id(node.value) for node in ast.walk(says) if isinstance(node, ast.Expr)}
        for node in ast.walk(says):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set() if id(node) in texts else {node.value}
            found.add(getattr(node, "attr", getattr(node, "id", "")))
    return frozenset(found)


def _set(strategy: Any, configs: str, name: str) -> None:
    """Gives an option a value that it does not have by default."""
    if configs == "pipeline_configs":
        strategy.pipeline_configs = {name: not strategy.pipeline_configs[name]}
        return
    if configs == "hybrid_configs" and name.endswith("_configs"):
        strategy.hybrid_configs[name].SetInParent()
        return
    if configs == "hybrid_configs":
        strategy.hybrid_configs = {name: not strategy.hybrid_configs[name]}
        return
    holder = strategy.hybrid_configs[configs]
    default = getattr(holder, name)
    if isinstance(default, (bool, int, str)):
        setattr(holder, name, {bool: not default, int: 7, str: "average"}[type(default)])
        assert getattr(strategy.hybrid_configs[configs], name) != default
    else:
        default.SetInParent()


def _trained(configs: str | None = None, name: str | None = None) -> list[bytes]:
    """Returns the loss and the parameters after two steps, with an option set or without."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    if configs and name:
        _set(strategy, configs, name)
    fleet.init(is_collective=True, strategy=strategy)
    try:
        model = pipeline()
        optimizer = sgd(model)
        losses = [model.train_batch(batch(seed=seed), optimizer) for seed in range(2)]
        return [*(loss.numpy().tobytes() for loss in losses), *bits(model.state_dict()).values()]
    finally:
        fleet.shutdown()


#: Attributes of tensor-parallel layers that scripts set, and no one reads here.
SWITCHES_OF_LAYERS = {"mp_async_allreduce", "mp_skip_c_identity", "mp_fused_linear_param_grad_add"}

OPTIONS_ELSEWHERE = {
    # Read by Paddle, or under another name.
    "order": "hybrid_parallel_order",
    **{f"{axis}_degree": "_degree" for axis in AXES},
}


@of("option of")
def test_an_option_does_what_the_page_says(row: Row, monkeypatch: Patch) -> None:
    words = words_of_the_sources()
    if row.subject == "pp_configs" and row.status == REFUSED:
        assert_refused(row, functools.partial(_wrap_overlapped, row.name))
    elif row.status == REFUSED:
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
        assert_refused(row, functools.partial(_init_with, row))
    elif row.status == WORKS:
        wanted = OPTIONS_ELSEWHERE.get(row.name, row.name)
        assert any(wanted in word for word in words) if wanted != row.name else wanted in words
        if row.subject == "pp_configs":
            _wrap_overlapped(row.name)
    else:
        elsewhere = {other.name for other in ROWS if other.status == WORKS}
        assert row.name not in words - elsewhere - SWITCHES_OF_LAYERS
        if row.subject != "sharding_configs":
            assert _trained(row.subject, row.name) == _trained()


def _init_with(row: Row) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    if row.subject == "hybrid_configs":
        strategy.hybrid_configs = {"pp_degree": 2, row.name: 2}
    else:
        strategy.hybrid_configs = {"pp_degree": 2, "sharding_degree": 2}
        setattr(strategy.hybrid_configs["sharding_configs"], row.name, True)
    fleet.init(is_collective=True, strategy=strategy)


def _wrap_overlapped(name: str) -> None:
    """Asks for an option that only a model with a method of its own for it takes notice of."""
    model = type("Model", (PipelineLayer,), {"overlapped_forward_backward": None})
    with job(2):
        strategy = theirs.fleet._user_defined_strategy
        setattr(strategy.hybrid_configs["pp_configs"], name, True)
        fleet.distributed_model(model(mlp_layers(), num_stages=2))


@of("value of")
def test_a_way_to_cut_is_taken_or_refused(row: Row) -> None:
    value = ast.literal_eval(row.name)
    block = type("Block", (paddle.nn.Linear,), {})
    layers = [kind(4, 4) for kind in (paddle.nn.Linear, block) * 2]
    with job(2):
        build = functools.partial(PipelineLayer, layers, num_stages=2, seg_method=value)
        if row.status == REFUSED:
            assert_refused(row, build)
        else:
            assert build().segment_parts == [0, 2, 4]


@of("environment variable")
def test_a_variable_is_read_where_it_works_and_nowhere_else(row: Row) -> None:
    assert (row.name in words_of_the_sources()) == (row.status == WORKS)


def _static_optimizer(strategy: Any = None) -> StaticOptimizer:
    optimizer = paddle.optimizer.SGD(0.1, parameters=paddle.nn.Linear(1, 1).parameters())
    begin: Any = None
    return StaticOptimizer(optimizer, strategy or fleet.DistributedStrategy(), begin, 1)


@of("switch of")
def test_a_switch_of_the_strategy_in_static_graph(row: Row) -> None:
    strategy = fleet.DistributedStrategy()
    setattr(strategy, row.name, True)
    if row.name == "recompute":
        strategy.recompute_configs = {"checkpoints": ["hidden"]}
    wrap = functools.partial(_static_optimizer, strategy)
    if row.status == REFUSED:
        assert_refused(row, wrap)
    else:
        wrap()


@of("field of")
def test_a_field_of_a_strategy_of_auto_parallel(row: Row) -> None:
    strategy = paddle.distributed.Strategy()
    assert hasattr(strategy.pipeline, row.name)
    if row.status == REFUSED and device_kind() == "cpu":
        setattr(strategy.pipeline, row.name, True)
        layer = paddle.nn.Linear(1, 1)
        with in_place_of_paddles():
            build = find("paddle.distributed.auto_parallel.static.engine.Engine")
            assert_refused(row, functools.partial(build, layer, strategy=strategy))


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "key of"], ids=str)
def test_a_key_of_a_cut_of_parallelize(row: Row) -> None:
    config = {"pp_config": {"split_spec": "0", row.name: "0"}}
    if device_kind() == "cpu":
        with in_place_of_paddles():
            split = functools.partial(paddle.distributed.parallelize, config=config)
            assert_refused(row, functools.partial(split, paddle.nn.Linear(1, 1)))


def test_the_page_lists_every_name_that_paddle_has() -> None:
    assert paddle_names.missing() == []


def test_a_new_name_of_paddles_is_missed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(theirs.meta_parallel.PipelineParallel, "wake", print, raising=False)
    assert paddle_names.missing() == [f"member of {META}.PipelineParallel wake"]

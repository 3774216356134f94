"""What an error says of names and arguments that Paddle no longer has."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import paddle
import pytest
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.launch.older import renamed
from tests.pipelines import job
from tests.static.networks import static_mode


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the hook for errors that nobody caught is given, as it would be printed."""
    texts: list[str] = []

    def note(kind: object, error: BaseException, trace: object) -> None:
        texts.append("".join(traceback.format_exception(error)))

    monkeypatch.setattr(sys, "excepthook", note)
    with renamed.told():
        yield texts
    assert sys.excepthook is note


def uncaught(call: str, **names: object) -> None:
    try:
        exec(call, {"paddle": paddle, "nn": nn, **names})
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            "nn.Linear(input_dim=2, output_dim=3)",
            "'input_dim' of older Paddle is 'in_features' today, in paddle.nn.Linear",
        ),
        (
            "paddle.optimizer.Momentum(0.1, 0.9, parameter_list=[])",
            "'parameter_list' of older Paddle is 'parameters' today, in paddle.optimizer.Momentum",
        ),
        ("paddle.flatten(paddle.ones([2]), stop_dim=1)", "paddle.flatten takes x, start_axis, "),
    ],
)
def test_an_argument_of_older_paddle_is_named(call: str, line: str, shown: list[str]) -> None:
    uncaught(call)
    assert f"TypeError: {call.partition('(')[0].rpartition('.')[2]}" in shown[0]
    assert f"\n  {line}" in shown[0]


def test_a_function_that_paddle_wraps_is_known_as_well(shown: list[str]) -> None:
    with static_mode():
        uncaught("paddle.static.nn.fc(input=paddle.static.data('x', [2, 3]), size=4)")
    assert "\n  'input' of older Paddle is 'x' today, in paddle.static.nn.fc" in shown[0]


def test_what_led_to_the_error_is_explained(shown: list[str]) -> None:
    with job(2):
        from fleetpipe.fleet.meta_parallel import PipelineLayer

        uncaught(
            "PipelineLayer([LayerDesc(nn.Linear, 2, output_dim=3), paddle.tanh], num_stages=2)",
            PipelineLayer=PipelineLayer,
            LayerDesc=LayerDesc,
        )
    assert "ConfigError: layer 0 (Linear) cannot be built" in shown[0]
    assert "\n  'output_dim' of older Paddle is 'out_features' today" in shown[0]


def test_other_errors_stay_as_they_are(shown: list[str]) -> None:
    uncaught("Linear(input_dim=2)", Linear=lambda x: x)
    uncaught("nn.Linear(2, 3, 4, 5, 6, 7)")
    uncaught("raise ValueError('Linear() got an unexpected keyword argument \\'input_dim\\'')")
    assert len(shown) == 3
    assert not [text for text in shown if "today" in text or " takes x" in text]

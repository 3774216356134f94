"""Every way to say where a model is cut, and what is refused."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import SplitPoint
from fleetpipe.errors import CaptureError, ConfigError
from tests.capture.models import GPT, tokens


class Steps(nn.Layer):  # type: ignore[misc]
    """Four linear layers, of which the second is called again after the third."""

    def __init__(self, marked: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))
        self.marked = marked

    def forward(self, x: Any) -> Any:
        x = self.b(self.a(x).tanh())
        if self.marked:
            fleetpipe.pipe_split()
        return self.d(self.b(self.c(x)))


def starts(model: Any, example: Any, split_spec: Any, **options: Any) -> list[int]:
    """Returns the first node of each stage but stage 0."""
    pipe = fleetpipe.pipeline(model, example, split_spec=split_spec, verify=False, **options)
    return [start - 1 for start in pipe.segment_parts[1:-1]]


X = paddle.ones([2, 3])


@pytest.mark.parametrize(
    ("split_spec", "expected"),
    [
        (["b"], [2]),
        (["c", "b"], [2, 3]),
        ({"c": SplitPoint.END, "b": SplitPoint.BEGINNING}, [2, 4]),
        # What has no stage goes with what ran before it, and a second call where it runs.
        ({"a": 0, "b": 1}, [2]),
        ({"a": 0, "c": 1}, [3]),
        ({"a": 0, "b": 0, "c": 1, "d": 2}, [3, 5]),
    ],
)
def test_the_model_is_cut_where_it_is_said(split_spec: Any, expected: list[int]) -> None:
    assert starts(Steps(), X, split_spec) == expected


def test_the_model_says_where_it_is_cut() -> None:
    assert starts(Steps(marked=True), X, None) == [3]
    model = Steps(marked=True)
    model.b.pipeline_stage, model.d.pipeline_stage = 0, 1
    assert starts(model, X, None) == [5]


def test_a_prefix_shares_its_sublayers_evenly() -> None:
    pipe = fleetpipe.pipeline(GPT(5), tokens(2), split_spec="blocks", num_stages=3, verify=False)
    first = [pipe.layers[start].__name__ for start in pipe.segment_parts[1:-1]]
    assert first == ["blocks.1.before", "blocks.3.before"]


class Hidden(nn.Layer):  # type: ignore[misc]
    """A layer without sublayers, which asks for a cut."""

    def forward(self, x: Any) -> Any:
        fleetpipe.pipe_split()
        return x * 2


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (["bb"], {}, ConfigError, "'bb', did you mean 'b'"),
    ({"layer9": 0}, {}, ConfigError, "'layer9', known: a, b, c, d"),
    (["a"], {}, ConfigError, "without a node"),
    ({"d": SplitPoint.END}, {}, ConfigError, "without a node"),
    (["b"], {"num_stages": 3}, ConfigError, "into 2 stages(.|\n)*expected: 3"),
    ({"a": 0, "c": 1, "d": 0}, {}, ConfigError, "'d' is in stage 0, and runs after"),
    ({"a": 0, "c": 2}, {}, ConfigError, "'c' is in stage 2"),
    ({"a": 0, "c": True}, {}, ConfigError, "no number of a stage"),
    (None, {}, ConfigError, "says nothing of stages"),
    ("a", {"num_stages": 2}, ConfigError, "no sublayer below"),
    (3, {}, ConfigError, "no form that is known"),
    ([3], {}, ConfigError, "no form that is known"),
]


@pytest.mark.parametrize(("split_spec", "options", "kind", "message"), REFUSED, ids=str)
def test_a_wrong_cut_is_refused(
    split_spec: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        starts(Steps(), X, split_spec, **options)


def test_a_mark_within_a_node_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_split_spec.py:\d+"):
        starts(nn.Sequential(nn.Linear(3, 3), Hidden()), X, None)


def test_running_statistics_of_two_stages_are_refused() -> None:
    norm = nn.BatchNorm1D(3)
    model = nn.Sequential(norm, nn.Linear(3, 3), norm)
    with pytest.raises(
        CaptureError, match=r"'0._mean'(.|\n)*0 in stage 0(.|\n)*0 \(call 2\) in stage 1"
    ):
        starts(model, X, ["1"])

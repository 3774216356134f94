"""What only PIR knows: an operation that was erased must not be looked at, its memory is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest

from fleetpipe.static.cut import split
from fleetpipe.static.ir import read
from tests.static.networks import mlp, static_mode

pytestmark = pytest.mark.skipif(
    not hasattr(getattr(paddle, "pir", None), "set_chunk_id"),
    reason="the older Program has operations of Python",
)


def test_no_operation_is_looked_at_after_it_was_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = paddle.pir.Operation
    gone: list[Any] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            if any(self is one for one in gone):
                pytest.fail("an operation was erased and looked at", pytrace=False)
            return original(self, *args)

        return method

    def erase(self: Any, original: Callable[[Any], None] = operation.erase) -> None:
        original(self)
        gone.append(self)

    def clone(self: Any, original: Callable[[Any], Any] = paddle.pir.Program.clone) -> Any:
        gone.clear()  # its operations may get the memory of those that are gone
        return original(self)

    with static_mode():
        loss = mlp(2, norm=True)()[0]
        reader = read(paddle.static.default_main_program())
        cut = split(reader.graph)
        number = reader.number(loss)
        assert number is not None
        stages = [reader.stage(cut, stage, number, 1.0) for stage in range(2)]
        for name in ("id", "name", "attrs", "has_attr", "results", "operands", "move_before"):
            monkeypatch.setattr(operation, name, watched(getattr(operation, name)))
        monkeypatch.setattr(operation, "erase", erase)
        monkeypatch.setattr(paddle.pir.Program, "clone", clone)
        for stage in stages:
            assert stage.cut(cut.readers(0)).backward is not None
            assert gone

"""What a CPU that says it is a GPU cannot show is left out by names, which have to be there."""

from __future__ import annotations

from itertools import chain

from tests.gpu.pretending import LEFT_OUT
from tests.launching import ROOT


def test_what_is_left_out_is_there() -> None:
    for name in chain(*LEFT_OUT.values()):
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        assert path.exists(), name
        assert not test or f"def {test}" in path.read_text(encoding="utf-8"), name

"""PaddleFormers' pipelines, unedited, beside its own single-device classes on Paddle alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launching import run
from tests.libraries.formers.models import MODELS, PLAIN

HERE = Path(__file__).parent


class Form(NamedTuple):
    """What tells that a form was that which was asked for.

    Attributes:
        chunks: Those of a rank.
        runs: How often an attention runs in a micro-batch.
        share: Which part of a rank's layers, about, it has the parameters of.
    """

    chunks: int = 1
    runs: int = 1
    share: float = 1.0


FORMS = {
    "pp 2": Form(),
    "virtual 2": Form(chunks=2),
    "recompute": Form(runs=2),
    "mp 2": Form(share=0.5),
    "sharding 2": Form(),
}
_ON_TWO = ("pp 2", "virtual 2", "recompute")
#: By job, its processes and its forms.
JOBS = {
    "one process": (None, _ON_TWO),
    "two processes": (2, _ON_TWO),
    "four processes": (4, ("mp 2", "sharding 2")),
}
CASES = [
    (model, job, form)
    for model in MODELS
    for job, (_, forms) in JOBS.items()
    for form in forms
    if form == "pp 2" or model not in PLAIN
]
#: What the library itself does otherwise, with the largest gap allowed.
OWN_GAPS = {("qwen3", "mp 2"): 1e-2}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The losses of each model: the single one's, and those of each form in each job."""
    folder = tmp_path_factory.mktemp("formers")
    args = [str(folder), *MODELS]
    run(HERE.parent / "single_worker.py", None, folder=folder, args=args, timeout=250)
    for job, (processes, forms) in JOBS.items():
        args = [str(folder), f"{job}.json", ",".join(forms), *MODELS]
        script = HERE / "pipeline_worker.py"
        run(script, processes, folder=folder, args=args, timeout=280)
    return {job: json.loads((folder / f"{job}.json").read_text()) for job in ("single", *JOBS)}


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(("model", "job", "form"), CASES)
def test_a_pipeline_has_the_losses_of_the_single_class(
    losses: dict[str, Any], model: str, job: str, form: str, record_property: Any
) -> None:
    trained, asked = losses[job][model][form], FORMS[form]
    assert (trained["chunks"], trained["runs"]) == (asked.chunks, asked.runs)
    whole = losses["one process"][model]["pp 2"]["parameters"]
    ranks = 1 if job == "one process" else 2
    assert trained["parameters"] == pytest.approx(whole / ranks * asked.share, rel=0.1)
    expected, found = losses["single"][model], trained["losses"]
    assert len(found) == len(expected)
    gap = max(abs(one - other) for one, other in zip(found, expected))
    record_property("gap", gap)
    assert gap < OWN_GAPS.get((model, form), 1e-5)
    # It has learned something: otherwise the same losses would say little.
    assert found[-1] < found[0] - 0.1

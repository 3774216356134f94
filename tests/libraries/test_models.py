"""PaddleNLP's pipelines, unedited, beside its own single-device classes on Paddle alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, run
from tests.libraries.models import JOBS, MODELS, PLAIN

HERE = Path(__file__).parent
#: Seconds that a job may take: each trains every model in every form.
LIMIT = 400
CASES = [
    (model, job, form)
    for model, family in MODELS.items()
    for job, what in JOBS.items()
    for form in what.forms
    if form not in family.lacks
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has each model saved, and the losses of the single ones."""
    folder = tmp_path_factory.mktemp("models")
    run(HERE / "single_worker.py", None, folder=folder, args=[str(folder), *MODELS], timeout=LIMIT)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    """By job, model and form, the losses and what tells the form; those of the single models."""
    for name, job in JOBS.items():
        args = [str(folder), name, *MODELS]
        run(HERE / "pipeline_worker.py", job.processes, folder=folder, args=args, timeout=LIMIT)
    return {job: json.loads((folder / f"{job}.json").read_text()) for job in ("single", *JOBS)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "job", "form"), CASES)
def test_a_pipeline_has_the_losses_of_the_single_class(
    trained: dict[str, Any], model: str, job: str, form: str, record_property: Any
) -> None:
    facts = dict(trained[job][model][form])
    expected, found = trained["single"][model], facts.pop("losses")
    assert facts == {**PLAIN, **JOBS[job].forms[form].facts}
    assert len(found) == len(expected)
    gap = max(abs(one - other) for one, other in zip(found, expected))
    record_property("gap", gap)
    assert gap < 1e-5
    # It has learned something: otherwise the same losses would say little.
    assert found[-1] < found[0] - 0.1


@pytest.mark.timeout(900)
def test_the_script_of_the_page_runs(folder: Path) -> None:
    page = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = script.replace("path/of/a/llama", str(folder / "llama"))
    done = run(script, None, folder=folder, timeout=LIMIT)
    assert len(re.findall(r"^4\.\d+$", done.logs[0], re.MULTILINE)) == 3

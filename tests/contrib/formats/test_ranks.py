"""Ranks load what other libraries wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import paddle
import pytest

from fleetpipe.contrib.formats.convert import convert
from tests.checkpoint.ranks.test_ranks import FORMS, contents, load, write
from tests.fixtures import Call


@pytest.mark.skipif(paddle.__version__ < "3", reason="Paddle 2.6.2 writes no flex checkpoint")
def test_other_formats_are_loaded_as_they_are(on_ranks: Call, tmp_path: Path) -> None:
    write(tmp_path, ["alone"])
    (tmp_path / "run").symlink_to(tmp_path / "alone")
    for form in FORMS[:-1]:
        convert(tmp_path / "alone", tmp_path / form, to=form)
    whole = sum(len(file) for file in contents(tmp_path / "alone").values())
    shutil.copytree(tmp_path / "formers", tmp_path / "cut short")
    (tmp_path / "cut short/optimizer_state/0_0.distcp").unlink()
    loaded = {"pp 1": [load(tmp_path, {"pp": 1})], "pp 2": [load(tmp_path, {"pp": 2})]}
    loaded["pp 2 x mp 2"] = on_ranks(load, 4, tmp_path, {"pp": 2, "mp": 2})
    for layout, ranks in loaded.items():
        for *results, refusal in ranks:
            assert [result[:2] for result in results] == [(True, 2)] * len(FORMS), layout
            assert "optimizer_state/0_0.distcp" in refusal
            if len(ranks) == 4:
                assert max(result[2] for result in results) < 0.5 * whole

"""Fleet's folder of layers, as a source of conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
from paddle import nn

from fleetpipe.contrib.formats import layer_files
from fleetpipe.dygraph.state import files
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet_files.layers import LayerFile
from fleetpipe.fleet_files.manifest import Writer


def test_a_folder_that_lacks_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    for rank in range(2):
        layers = {LayerFile(rank): nn.Linear(3, 3).state_dict()}
        files.save(tmp_path, layers, 0, Writer("all/1", rank, 2))
    (tmp_path / "layer_00-tensor_00-model_states.pdparams").unlink()
    with pytest.raises(CheckpointError, match=r"is missing: layer_00-tensor_00-"):
        layer_files.read_folder(tmp_path)

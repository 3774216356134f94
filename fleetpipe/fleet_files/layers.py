"""The names of the files in a folder that Fleet saves, one for each layer.

Layer 3 is in ``layer_03-tensor_00-model_states.pdparams``; ``tensor_00`` is the tensor-parallel
shard. With several chunks on a rank it is ``layer_03-virtual_pp_stage_01-tensor_00-..``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(
    r"layer_(?P<number>\d{2,})(-virtual_pp_stage_(?P<chunk>\d{2,}))?"
    r"-tensor_(?P<shard>\d{2,})-model_states\.pdparams"
)


class LayerFile(NamedTuple):
    """The file of a layer.

    Attributes:
        number: The number of the layer in the whole list.
        chunk: The number of its chunk on its rank; None if each rank has one.
        shard: The tensor-parallel shard.
    """

    number: int
    chunk: int | None = None
    shard: int = 0

    @property
    def stem(self) -> str:
        """The begin of the file's name, which all shards have in common."""
        chunk = "" if self.chunk is None else f"-virtual_pp_stage_{self.chunk:02d}"
        return f"layer_{self.number:02d}{chunk}"

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.stem}-tensor_{self.shard:02d}-model_states.pdparams"

    @classmethod
    def parse(cls, name: str) -> LayerFile | None:
        """Parses the name of a file; returns None if it is not the file of a layer."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        chunk = None if match["chunk"] is None else int(match["chunk"])
        return cls(int(match["number"]), chunk, int(match["shard"]))

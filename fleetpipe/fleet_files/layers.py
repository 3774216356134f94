"""The names of the files of Fleet's folder, one for each layer.

That of layer 3 is ``layer_03-tensor_00-model_states.pdparams``, where ``tensor_00`` is the
tensor-parallel shard; with several chunks on a rank ``layer_03-virtual_pp_stage_01-tensor_00-..``.
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
        number: That of the layer in the whole list.
        chunk: The number of its chunk on its rank; None where each rank has one.
        shard: The tensor-parallel shard.
    """

    number: int
    chunk: int | None = None
    shard: int = 0

    @property
    def stem(self) -> str:
        """The beginning of its name, which the files of all shards share."""
        chunk = "" if self.chunk is None else f"-virtual_pp_stage_{self.chunk:02d}"
        return f"layer_{self.number:02d}{chunk}"

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.stem}-tensor_{self.shard:02d}-model_states.pdparams"

    @classmethod
    def named(cls, name: str) -> LayerFile | None:
        """Returns the file of some name; None if it is no layer's."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        chunk = None if match["chunk"] is None else int(match["chunk"])
        return cls(int(match["number"]), chunk, int(match["shard"]))

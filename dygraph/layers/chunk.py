"""A chunk as Fleet hands it out: the layers of one stage, to look at and not to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.backward.recompute import layers_in
from fleetpipe.paddle_api import paddle


class PipelineLayerChunk(paddle.nn.Layer):
    """The layers of one stage; its sublayers have their numbers in the whole list as names.

    A shared layer that is called through its ``forward_func`` has its key as name.
    """

    def __init__(
        self, functions: Mapping[int, Callable[[Nest], Nest]], keys: Mapping[int, str]
    ) -> None:
        """Takes built layers and functions by their number in the whole list, in order."""
        super().__init__()
        self.run_function = list(functions.values())
        for index, function in functions.items():
            if isinstance(function, paddle.nn.Layer):
                self.add_sublayer(str(index), function)
            elif index in keys:
                self.add_sublayer(keys[index], *layers_in(function))

    def get_run_function(self) -> list[Callable[[Nest], Nest]]:
        """Returns the layers and functions in order."""
        return self.run_function

    def __iter__(self) -> Iterator[Callable[[Nest], Nest]]:
        return iter(self.run_function)

    def __len__(self) -> int:
        return len(self.run_function)

    def forward(self, *_args: object, **_named: object) -> NoReturn:
        """Refuses to be called, as Fleet's chunk does.

        Raises:
            PermissionError: Always.
        """
        raise PermissionError(
            "a chunk of a PipelineLayer cannot be called: call the PipelineLayer with chunk_id"
        )

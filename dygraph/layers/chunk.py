"""A chunk as Fleet returns it: the layers of one stage, to inspect and not to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.backward.recompute import layers_in
from fleetpipe.paddle_api import paddle


class PipelineLayerChunk(paddle.nn.Layer):
    """The layers of one stage; its sublayers are named by their numbers in the whole list.

    A shared layer that is called through its ``forward_func`` is named by its key.
    """

    def __init__(
        self, functions: Mapping[int, Callable[[Nest], Nest]], keys: Mapping[int, str]
    ) -> None:
        """Creates a chunk of built layers and functions, given in order by their numbers."""
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

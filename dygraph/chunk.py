"""A chunk as Fleet hands it out: the layers of one stage, to look at and not to call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Callable, NoReturn

from fleetpipe._paddle import paddle


class PipelineLayerChunk(paddle.nn.Layer):
    """The layers of one stage; its sublayers have their numbers in the whole list as names."""

    def __init__(self, functions: Mapping[int, Callable[[Any], Any]]) -> None:
        """Takes built layers and functions by their number in the whole list, in order."""
        super().__init__()
        self.run_function = list(functions.values())
        for index, function in functions.items():
            if isinstance(function, paddle.nn.Layer):
                self.add_sublayer(str(index), function)

    def __iter__(self) -> Iterator[Callable[[Any], Any]]:
        """Yields the layers and functions in order."""
        return iter(self.run_function)

    def __len__(self) -> int:
        """Returns the number of layers and functions."""
        return len(self.run_function)

    def forward(self, *_args: Any, **_named: Any) -> NoReturn:
        """Refuses to be called, as Fleet's chunk does.

        Raises:
            PermissionError: Always.
        """
        raise PermissionError(
            "a chunk of a PipelineLayer cannot be called: call the PipelineLayer with chunk_id"
        )

"""Loading data: Paddle's private names below ``paddle.io``, alike in 2.6.2 and 3.3.x."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from paddle.io import multiprocess_utils
from paddle.io.dataloader import dataloader_iter as _iterators
from paddle.io.dataloader.collate import default_collate_fn, default_convert_fn

from fleetpipe.paddle_api import paddle

#: With the names that its stub hides.
_multiprocess_utils: Any = multiprocess_utils
_any_iterators: ModuleType = _iterators
#: Seconds in which a thread that told of its end has ended.
_END_SECONDS = 1.0
_Threaded: Any = _any_iterators._DataLoaderIterSingleProcess


def load_data_in_threads() -> None:
    """Lets a ``DataLoader`` with workers begin in another thread than the main one.

    It takes a handler of SIGCHLD, as only the main thread can, to be told at once that a worker
    died; without one it finds that out when it next waits for a batch.
    """
    _multiprocess_utils._SIGCHLD_handler_set = True


class _ThreadedBatches(_Threaded):  # type: ignore[misc]
    """Batches that a thread loads, which raise what ended it: Paddle's are waited for for ever."""

    _failure: BaseException | None = None

    def _thread_loop(self, *arguments: Any) -> None:
        try:
            super()._thread_loop(*arguments)
        except BaseException as error:
            self._failure = error
            self._exit_thread_expectedly()

    def __next__(self) -> Any:
        thread = self._thread
        try:
            return super().__next__()
        except Exception:  # StopIteration too, and what Paddle says of a queue that was killed
            if thread is not None:
                thread.join(_END_SECONDS)
            if self._failure is not None:
                raise self._failure from None
            raise


_stock_batches: Callable[[Any], Iterable[Any]] = paddle.io.DataLoader.__iter__


def batches_of(loader: paddle.io.DataLoader) -> Iterable[Any]:
    """Begins to load as Paddle's own ``__iter__`` does, and raises here what fails in loading."""
    return (_stock_batches if loader.num_workers else _ThreadedBatches)(loader)


__all__ = ["batches_of", "default_collate_fn", "default_convert_fn", "load_data_in_threads"]

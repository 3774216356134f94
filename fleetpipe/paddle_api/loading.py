"""Loading data: Paddle's private names below ``paddle.io``, the same in 2.6.2 and 3.3.x."""

from __future__ import annotations

import atexit
import gc
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from paddle.io import multiprocess_utils
from paddle.io.dataloader import dataloader_iter as _iterators
from paddle.io.dataloader.collate import default_collate_fn, default_convert_fn
from paddle.io.dataloader.worker import _WorkerException

from fleetpipe.errors import PipelineTimeout
from fleetpipe.paddle_api import paddle

#: Paddle's modules with the names that their stubs hide.
_multiprocess_utils: Any = multiprocess_utils
_any_iterators: ModuleType = _iterators
#: Seconds that a thread may take to end after it has announced that.
_END_SECONDS = 1.0
#: The share of the limit that a wait for a batch may take: its error comes before those of ranks
#: that wait for this one.
_OF_LIMIT = 0.9
_Threaded: Any = _any_iterators._DataLoaderIterSingleProcess
_Worked: Any = _any_iterators._DataLoaderIterMultiProcess

#: Whether garbage collection was on, for each fork that is under way.
_collects: list[bool] = []

#: Windows, where a loader has no workers, lacks it.
_set_stock_handlers: Any = getattr(_any_iterators.core, "_set_process_signal_handler", None)
#: Memory shared with workers: whether this process ends, and so may end them by SIGTERM.
_leaving = mmap.mmap(-1, 1)


def load_data_in_threads() -> None:
    """Lets a ``DataLoader`` with workers start in a thread other than the main one.

    Paddle installs a handler of SIGCHLD, which only the main thread can, to learn at once that a
    worker died; without one it learns that when it next waits for a batch.
    """
    _multiprocess_utils._SIGCHLD_handler_set = True


class _Batches:
    """Makes Paddle's iterators of batches raise the errors of loading, and limits their waits.

    Paddle's own wait for ever for a batch that a thread or worker failed to load, and lose the good
    batches before it.
    """

    limit: float | None = None
    _dataset: Any
    _blocking_queue: Any
    _thread: threading.Thread | None
    _try_shutdown_all: Any
    _exit_thread_expectedly: Any
    _failure: BaseException | None = None
    _late = False

    def __next__(self) -> Any:
        stock: Any = super()
        thread, timer = self._thread, None
        self._late = False
        if self.limit is not None:
            timer = threading.Timer(_OF_LIMIT * self.limit, self._give_up)
            timer.daemon = True
            timer.start()
        try:
            return stock.__next__()
        except Exception:  # StopIteration too, and Paddle's error for a queue that was killed
            late: bool = self._late  # set by the timer
            if late:
                raise self._late_error() from None
            if thread is not None:
                thread.join(_END_SECONDS)
            failure = self._failure or self._ended_workers()
            if failure is not None:
                raise failure from None
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _thread_loop(self, *arguments: Any) -> None:
        stock: Any = super()
        try:
            stock._thread_loop(*arguments)
        except BaseException as error:
            self._failure = error
            self._exit_thread_expectedly()

    def _ended_workers(self) -> RuntimeError | None:
        """Returns the error to raise if workers were killed or have exited."""
        codes = [worker.exitcode for worker in getattr(self, "_workers", [])]
        if not any(codes):
            return None
        return RuntimeError(f"a worker of a DataLoader has ended; exit codes by worker: {codes}")

    def _give_up(self) -> None:
        """Ends a wait that has reached its limit; called in another thread."""
        self._late = True
        self._blocking_queue.kill()

    def _late_error(self) -> PipelineTimeout:
        """Returns the error of a wait that was too long, and kills the workers."""
        workers = getattr(self, "_workers", [])
        states = [
            f"worker {number} (process {worker.pid}) "
            + ("is alive" if worker.is_alive() else f"ended with {worker.exitcode}")
            for number, worker in enumerate(workers)
        ]
        # Without this the handler of SIGCHLD would raise errors for the killed workers.
        _any_iterators.core._erase_process_pids(id(self))
        for worker in workers:
            worker.kill()
        # Paddle would join the thread, which never ends.
        self._thread, self._shutdown = None, True
        return PipelineTimeout(
            f"a DataLoader over a {type(self._dataset).__name__} brought no batch within "
            f"{_OF_LIMIT * (self.limit or 0):g} s",
            where="while this rank waits for its data",
            got="; ".join(states) or "a thread of this process loads it",
            cause="__getitem__, a collate_fn or a worker_init_fn waits for something, or a worker "
            "never began",
            fix="try the dataset by itself, and with num_workers=0; raise "
            "fleetpipe_configs['timeout'] where a batch takes longer",
        )


class _ThreadedBatches(_Batches, _Threaded):  # type: ignore[misc]
    """Batches that a thread loads."""


class _WorkedBatches(_Batches, _Worked):  # type: ignore[misc]
    """Batches that worker processes load."""

    def _get_data(self) -> Any:
        try:
            batch = super()._get_data()
            if type(batch) is _WorkerException:
                batch.reraise()  # type: ignore[no-untyped-call]
            return batch
        except BaseException as error:
            self._failure = error

    def _exit_thread_unexpectedly(self) -> None:
        """Keeps the batches before a failure, which Paddle would drop."""
        self._failure = self._failure or self._ended_workers()
        self._exit_thread_expectedly()


def batches_of(loader: paddle.io.DataLoader, limit: float | None = None) -> Iterator[Any]:
    """Starts to load as Paddle's own ``__iter__`` does, and raises the errors of loading here.

    Args:
        loader: The loader.
        limit: Most seconds that one batch may take; None for any number.
    """
    any_loader: Any = loader
    if not loader.num_workers:
        batches = _ThreadedBatches(loader)
    elif not any_loader._persistent_workers:
        batches = _WorkedBatches(loader)
    elif any_loader._iterator is None:
        batches = any_loader._iterator = _WorkedBatches(loader)
    else:
        batches = any_loader._iterator
        batches._reset()
    batches.limit = limit
    return batches


@contextmanager
def closing_iterator(batches: Iterator[Any]) -> Iterator[None]:
    """Ends the threads and workers of an iterator of :func:`batches_of` at the end."""
    try:
        yield
    finally:
        if isinstance(batches, _Batches) and not getattr(batches, "_persistent_workers", False):
            batches._try_shutdown_all()


def _before_fork() -> None:
    _collects.append(gc.isenabled())
    gc.disable()


def _in_parent() -> None:
    if _collects.pop():
        gc.enable()


def _in_child() -> None:
    """Keeps the child from collecting the parent's queues, whose threads it lacks."""
    gc.freeze()
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def keep_workers_from_signals() -> None:
    """Makes later workers survive SIGTERM as long as this process does, which handles it.

    Launchers and schedulers send the signal to the workers too. Their death would raise an error
    here at once, in the middle of the step that is to be saved.
    """
    _any_iterators.core._set_process_signal_handler = _set_worker_handlers


def _set_worker_handlers() -> None:
    _set_stock_handlers()
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if _leaving[0] else None)


atexit.register(_leaving.write, b"1")

__all__ = [
    "batches_of",
    "default_collate_fn",
    "default_convert_fn",
    "closing_iterator",
    "keep_workers_from_signals",
    "load_data_in_threads",
]

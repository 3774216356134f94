"""Makes Paddle's ``DataLoader`` raise the errors of loading and limit its waits.

Paddle's private names below ``paddle.io`` are the same in 2.6.2 and 3.3.x.
"""

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
#: Seconds in which a thread ends after it has announced its end.
_END_SECONDS = 1.0
#: The share of the limit after which a wait for a batch ends: its error comes before those of ranks
#: that wait for this one.
_LIMIT_SHARE = 0.9
_Threaded: Any = _any_iterators._DataLoaderIterSingleProcess
_Worked: Any = _any_iterators._DataLoaderIterMultiProcess

#: Whether garbage collection was on before each fork that is under way.
_was_collecting: list[bool] = []

#: Paddle's function that sets the signal handlers of a worker; None on Windows, which has none.
_set_stock_handlers: Any = getattr(_any_iterators.core, "_set_process_signal_handler", None)
#: A byte of memory that the workers see, too: not 0 once this process ends, and may end workers.
_is_ending = mmap.mmap(-1, 1)


def load_data_in_threads() -> None:
    """Lets a ``DataLoader`` with workers start in a thread other than the main one.

    Paddle installs a handler of SIGCHLD, which only the main thread can, to notice at once that a
    worker died; without a handler it notices that when it next waits for a batch.
    """
    _multiprocess_utils._SIGCHLD_handler_set = True


class _Batches:
    """Makes Paddle's iterators of batches raise the errors of loading, and limits their waits.

    Paddle's own iterators wait for ever for a batch that a thread or worker failed to load, and
    lose the good batches before it.

    Attributes:
        limit: The largest number of seconds for one batch; None for no limit.
    """

    limit: float | None = None
    _dataset: Any
    _blocking_queue: Any
    _thread: threading.Thread | None
    _try_shutdown_all: Any
    _exit_thread_expectedly: Any
    _failure: BaseException | None = None
    _is_late = False

    def __next__(self) -> Any:
        stock: Any = super()
        thread, timer = self._thread, None
        self._is_late = False
        if self.limit is not None:
            timer = threading.Timer(_LIMIT_SHARE * self.limit, self._give_up)
            timer.daemon = True
            timer.start()
        try:
            return stock.__next__()
        except Exception:  # StopIteration too, and Paddle's error for a queue that was killed
            is_late: bool = self._is_late  # set by the timer
            if is_late:
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
        """Loads batches, in Paddle's thread; stores an error for the thread that waits."""
        stock: Any = super()
        try:
            stock._thread_loop(*arguments)
        except BaseException as error:
            self._failure = error
            self._exit_thread_expectedly()

    def _ended_workers(self) -> RuntimeError | None:
        """Returns the error of workers that were killed or have exited; None if all are well."""
        codes = [worker.exitcode for worker in getattr(self, "_workers", [])]
        if not any(codes):
            return None
        return RuntimeError(f"a worker of a DataLoader has ended; exit codes by worker: {codes}")

    def _give_up(self) -> None:
        """Ends a wait that has reached its limit; a timer calls it in its own thread."""
        self._is_late = True
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
            f"{_LIMIT_SHARE * (self.limit or 0):g} s",
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
        """Returns the next result of a worker; stores an error, and returns None."""
        try:
            batch = super()._get_data()
            if type(batch) is _WorkerException:
                batch.reraise()  # type: ignore[no-untyped-call]
            return batch
        except BaseException as error:
            self._failure = error

    def _exit_thread_unexpectedly(self) -> None:
        """Ends the thread without dropping the batches before a failure, unlike Paddle's method."""
        self._failure = self._failure or self._ended_workers()
        self._exit_thread_expectedly()


def batches_of(loader: paddle.io.DataLoader, limit: float | None = None) -> Iterator[Any]:
    """Returns an iterator over a loader's batches, which raises the errors of loading.

    It starts to load at once, as Paddle's own ``iter(loader)`` does.

    Args:
        loader: The loader.
        limit: The largest number of seconds for one batch; None for no limit.
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
    """Opens a context at whose end the threads and workers of an iterator end.

    Args:
        batches: An iterator of :func:`batches_of`; any other is left alone.
    """
    try:
        yield
    finally:
        if isinstance(batches, _Batches) and not getattr(batches, "_persistent_workers", False):
            batches._try_shutdown_all()


def _pause_collection() -> None:
    """Turns garbage collection off before a fork."""
    _was_collecting.append(gc.isenabled())
    gc.disable()


def _resume_collection() -> None:
    """Turns garbage collection on after a fork, if it was on before."""
    if _was_collecting.pop():
        gc.enable()


def _resume_collection_in_child() -> None:
    """Turns collection on in a child, for new objects only: it lacks the parent's threads."""
    gc.freeze()
    _resume_collection()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_pause_collection,
        after_in_parent=_resume_collection,
        after_in_child=_resume_collection_in_child,
    )


def keep_workers_from_signals() -> None:
    """Makes workers that start later ignore SIGTERM until this process ends.

    Launchers and schedulers send the signal, which this process handles, to its workers too. The
    death of a worker would raise an error here, in the middle of the step that is to be saved.
    """
    _any_iterators.core._set_process_signal_handler = _set_worker_handlers


def _set_worker_handlers() -> None:
    """Sets Paddle's signal handlers in a worker; SIGTERM ends it only if its parent ends.

    If the parent has no handler of SIGTERM, its workers keep the system's default.
    """
    _set_stock_handlers()
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if _is_ending[0] else None)


atexit.register(_is_ending.write, b"1")

__all__ = [
    "batches_of",
    "default_collate_fn",
    "default_convert_fn",
    "closing_iterator",
    "keep_workers_from_signals",
    "load_data_in_threads",
]

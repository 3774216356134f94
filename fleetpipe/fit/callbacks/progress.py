"""Shows the progress of a run: a bar in a terminal, lines in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows

#: Seconds from one line to the next, with ``verbose=1`` and without a terminal.
_SECONDS_OF_A_LINE = 10.0
#: The largest time left, in seconds, for which the end of a training is shown.
_LONGEST_SHOWN = 1e9
#: The formats of the bar, without tqdm's times and rate, which are of batches of one epoch.
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
_FORMAT_WITHOUT_TOTAL = "{desc}: {n_fmt}{postfix}"
#: The smallest width of the bar itself, and the assumed width of an unknown terminal.
_BAR_WIDTH, _DEFAULT_WIDTH = 8, 80
#: The ends of the texts that have precedence in a narrow terminal.
_PREFERRED_ENDINGS = (" samples/s", " left")


@shows("verbose", "log_freq")
class Progress(paddle.callbacks.ProgBarLogger):
    """Shows the progress of a ``Model``'s loops, in place of Paddle's ``ProgBarLogger``.

    The first rank of the job shows loss and metrics, samples a second of all replicas together, the
    time that is left of the whole training, and when it ends. With ``verbose=1`` it shows a bar if
    standard error is a terminal, else a line every ten seconds, as under a launcher; with
    ``verbose=2`` a line every ``log_freq`` batches. The end of an epoch has a line too.
    """

    model: Any

    def __init__(self, log_freq: int = 10, verbose: int = 1) -> None:
        """Configures how often to show progress.

        Args:
            log_freq: Batches from one line to the next.
            verbose: 0 shows nothing, 1 a bar, 2 lines.
        """
        super().__init__(log_freq, verbose)
        self._with_bar = verbose == 1 and sys.stderr.isatty()
        self._bar: tqdm | None = None
        #: Of the loop that runs: its name, the names of its figures, its batches (None if unknown).
        self._title = ""
        self._names: list[str] = []
        self._steps: int | None = None
        #: Its batches that have run, also before a resumption, and the samples since its begin.
        self._batches_done = self._samples = 0
        #: When the loop began and when a line, or the bar's texts, were last shown, in seconds.
        self._loop_began = self._shown_at = 0.0
        #: Batches of this training that have run, and that will still run; None if unknown.
        self._trained = 0
        self._to_come: int | None = None
        self._training_since = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock that estimates the end of the training."""
        self._trained, self._training_since = 0, time.perf_counter()

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Shows nothing before a batch."""

    on_eval_batch_begin = on_predict_batch_begin = on_train_batch_begin

    def on_epoch_begin(self, epoch: int | None = None, logs: Any = None) -> None:
        """Starts the bar of an epoch.

        Args:
            epoch: The number of the epoch, from 0.
            logs: A dict, though Paddle's methods have the default None: ``"step"`` is the number
                of batches of this epoch that ran before, if the training was resumed within it.
        """
        number, epochs, steps = epoch or 0, self.params["epochs"], self.params["steps"]
        batches_done = logs.get("step", 0)
        self._to_come = None if steps is None else (epochs - number) * steps - batches_done
        self._begin_loop(f"epoch {number + 1}/{epochs}", steps, batches_done)

    def on_eval_begin(self, logs: Any = None) -> None:
        """Starts the bar of an evaluation; ``logs`` is a dict with ``"steps"``, its batches."""
        self._begin_loop("evaluation", logs.get("steps"))

    def on_predict_begin(self, logs: Any = None) -> None:
        """Starts the bar of a prediction; ``logs`` is a dict with ``"steps"``, its batches."""
        self._begin_loop("prediction", logs.get("steps"))

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Counts a training batch, and shows a line if one is due."""
        self._trained += 1
        if self._to_come is not None:
            self._to_come -= 1
        self._count_batch(logs)

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        """Counts a batch of an evaluation or a prediction, and shows a line if one is due."""
        self._count_batch(logs)

    on_predict_batch_end = on_eval_batch_end

    def _count_batch(self, logs: Any) -> None:
        """Counts a batch; updates the bar, or shows a line if one is due.

        Args:
            logs: The figures of the loop by name; ``"batch_size"`` is the batch's number of rows.
        """
        self._samples += logs["batch_size"]
        self._batches_done += 1
        now = time.perf_counter()
        if self._bar is not None:
            if now - self._shown_at >= self._bar.mininterval:
                # Only as often as tqdm draws the bar, since the texts take time.
                self._shown_at = now
                self._update_bar(self._bar, logs)
            self._bar.update()
        # After the last batch the end of the loop writes a line.
        elif self._batches_done != self._steps and (
            now - self._shown_at >= _SECONDS_OF_A_LINE
            if self.verbose == 1
            else self._batches_done % self.log_freq == 0
        ):
            self._shown_at = now
            self._write_line(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Shows the epoch's last figures, and ends its bar."""
        self._end_loop(logs)

    def on_eval_end(self, logs: Any = None) -> None:
        """Shows the last figures of an evaluation or a prediction, and ends its bar."""
        self._end_loop(logs)

    on_predict_end = on_eval_end

    def on_train_end(self, logs: Any = None) -> None:
        """Shows nothing, since the end of the last epoch has a line."""

    def close(self) -> None:
        """Ends the line of the bar in the terminal, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _is_shown(self) -> bool:
        """Returns whether this rank shows progress."""
        return bool(self.verbose) and self.model.is_rank("first")

    def _begin_loop(self, title: str, steps: int | None, batches_done: int = 0) -> None:
        """Starts the bar of a loop.

        Args:
            title: The name of the loop, such as "evaluation".
            steps: The number of batches; None if it is unknown.
            batches_done: The number of batches that ran before.
        """
        self._title, self._steps, self._batches_done = title, steps, batches_done
        self._samples = 0
        self._loop_began = time.perf_counter()
        # The time of the last line is kept from one epoch to the next.
        self._shown_at = self._shown_at or self._loop_began
        self._names = self.model.metric_names
        if self._is_shown() and self._with_bar:
            form = _FORMAT_WITHOUT_TOTAL if steps is None else _FORMAT
            self._bar = tqdm(
                total=steps, initial=batches_done, desc=title, dynamic_ncols=True, bar_format=form
            )

    def _end_loop(self, logs: Any) -> None:
        """Shows the last figures in the bar or in a line, and ends the bar."""
        if self._bar is not None:
            if self._batches_done:
                self._update_bar(self._bar, logs)
            self.close()
        elif self._batches_done:
            self._write_line(logs)

    def _write_line(self, logs: Any) -> None:
        """Writes a line with the loop, the batch and the figures."""
        if self._is_shown():
            steps = "" if self._steps is None else f"/{self._steps}"
            rank_policy.say(
                f"{self._title}, batch {self._batches_done}{steps}: {', '.join(self._texts(logs))}"
            )

    def _update_bar(self, bar: tqdm, logs: Any) -> None:
        """Sets as many texts beside the bar as fit: loss, rate and time left before others."""
        head = f"{self._title}: 100%|| {self._steps}/{self._steps}, "
        width = (bar.format_dict["ncols"] or _DEFAULT_WIDTH) - len(head) - _BAR_WIDTH
        texts = self._texts(logs)
        preferred = [
            text for text in texts if text.startswith("loss ") or text.endswith(_PREFERRED_ENDINGS)
        ]
        fitting = [*preferred, *(text for text in texts if text not in preferred)]
        while len(", ".join(fitting)) >= width and fitting:
            fitting.pop()
        bar.set_postfix_str(", ".join(text for text in texts if text in fitting), refresh=False)

    def _texts(self, logs: Any) -> list[str]:
        """Returns the loss, the metrics, the rate and the end of the training as texts."""
        rate = self._samples / (time.perf_counter() - self._loop_began)
        values = [(name, logs[name]) for name in self._names if name in logs]
        shown = [f"{n} {v[0] if isinstance(v, list) else v:.4g}" for n, v in values]
        speed = f"{rate:.0f}" if rate >= 1e4 else f"{rate:.4g}"
        return [*shown, f"{speed} samples/s", *self._end_of_training()]

    def _end_of_training(self) -> list[str]:
        """Returns texts with the time left of a training and when it ends; [] if unknown."""
        if not self._to_come or not self._trained:
            return []
        left = self._to_come / self._trained * (time.perf_counter() - self._training_since)
        if left > _LONGEST_SHOWN:
            return []
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        return [f"{tqdm.format_interval(left)} left", f"ends {clock}"]


@contextmanager
def closing_bars(callbacks: Sequence[Any]) -> Iterator[None]:
    """Returns a context at whose end the callbacks' bars are closed, also after an error."""
    try:
        yield
    finally:
        for callback in callbacks:
            if isinstance(callback, Progress):
                callback.close()

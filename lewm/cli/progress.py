"""Progress on the terminal: a bar with rates and an ETA, or a line now and then when nobody watches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lewm.types import ProgressCallback

# Without a terminal: seconds between two lines.
LINE_INTERVAL = 15.0


class Display:
    """A live bar on a terminal, a plain line now and then elsewhere. Implements ``TrainingMonitor``."""

    def __init__(self, console: Console, description: str) -> None:
        self.console, self.description = console, description
        self._started = self._last_line = time.monotonic()
        self._first_done: int | None = None
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task(description, total=None, detail="")

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Show that ``done`` of ``total`` is finished."""
        now = time.monotonic()
        if self._first_done is None:
            self._first_done, self._started = done, now
        self.progress.update(self._task, completed=done, total=total, detail=detail)
        if not self.console.is_terminal and (now - self._last_line > LINE_INTERVAL or done == total):
            self._last_line = now
            eta = f"ETA {(total - done) / rate:.0f} s" if (rate := self._rate(done)) else ""
            self.console.print(f"{self.description} {done}/{total} {detail} {eta}".rstrip(), highlight=False)

    def step(self, step: int, total: int, values: dict[str, float]) -> None:
        """Show a training step, with its speed and, where they were measured, the terms of the loss."""
        terms = {name.removesuffix("_loss"): value for name, value in values.items() if name.endswith("_loss")}
        named = ", ".join(f"{name} {value:.3g}" for name, value in terms.items())
        losses = f"loss {values['loss']:.3f} ({named})  " if values else ""
        self.update(step, total, f"{losses}{self._rate(step):.1f} steps/s")

    def note(self, message: str) -> None:
        """Say something beside the bar."""
        self.console.print(message, highlight=False, markup=False)

    def _rate(self, done: int) -> float:
        """Units per second since the first update: what was done before it belongs to an earlier run."""
        first = done if self._first_done is None else self._first_done
        return (done - first) / max(time.monotonic() - self._started, 1e-9)


@contextlib.contextmanager
def training_bar(console: Console, description: str = "train") -> Iterator[Display]:
    """A monitor for ``lewm.train.loop.train``."""
    display = Display(console, description)
    with display.progress:
        yield display


@contextlib.contextmanager
def progress_bar(console: Console, description: str) -> Iterator[ProgressCallback]:
    """A callback ``(done, total)`` that is shown as a bar while the context lasts."""
    with training_bar(console, description) as display:
        yield display.update

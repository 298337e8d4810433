"""Ctrl-C while the ``lewm`` command starts, which it does for seconds: Python, NumPy and torch are being imported.

An exception in the middle of that is a long traceback, is lost, or aborts the process within C++. Nothing has begun by
then, so the process ends at once instead. Whoever imports lewm in a program of their own keeps their signals.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

INTERRUPTED = "Interrupted. The same command continues where it stopped (data tools start again)."
STATUS = 130
STDERR = 2
MOMENT = 0.01  # seconds
SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}  # and what they do if nobody asks


def is_command() -> bool:
    """Whether this process runs the ``lewm`` command, by its script or as ``python -m lewm``."""
    if sys.argv[:1] == ["-m"]:  # Python is looking for what it is to run
        given = sys.orig_argv
        return "-m" in given[:-1] and given[given.index("-m") + 1] == "lewm"
    return bool(sys.argv) and sys.argv[0].replace("\\", "/").rpartition("/")[2] in ("lewm", "lewm.exe")


def leave_on_signals() -> None:
    """From now on, SIGINT and SIGTERM end the process; one that is ignored stays so."""
    for number, usual in SIGNALS.items():
        if signal.getsignal(number) == usual:
            signal.signal(number, _leave)


def interrupt_on_signals() -> None:
    """From now on, they raise ``KeyboardInterrupt``, as soon as that is safe."""
    for number, usual in SIGNALS.items():
        if signal.getsignal(number) in (usual, _leave):
            signal.signal(number, _interrupt)


def hear_lost_interrupts() -> None:
    """From now on, an interrupt that Python drops comes once more, a moment later.

    It drops what is raised in ``__del__`` and where a weak reference ends, which is often while modules are imported.
    """
    sys.unraisablehook = _interrupt_again


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    again = (threading.main_thread().ident, signal.SIGINT)
    threading.Timer(MOMENT, signal.pthread_kill, again).start()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(STDERR, f"{INTERRUPTED}\n".encode())
    os._exit(STATUS)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        _leave(number, frame)
    raise KeyboardInterrupt

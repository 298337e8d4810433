"""Starting processes that run environments: collection and evaluation do it alike, and talk to them each in its way."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from subprocess import Popen

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def start_worker(module: str, *arguments: str, stdin: int, stdout: int, pass_fds: Collection[int] = ()) -> Popen[bytes]:
    """A process that runs ``module`` as a program, on one thread. (``multiprocessing`` would run the caller's script.)

    It finds the modules that the caller finds. What is written to its stdin is sent at once, and so is what it prints:
    workers are killed when they are no longer needed, and would take it with them.
    """
    command = [sys.executable, "-u", "-P", "-m", module, *arguments]
    environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
    # In a session of its own, where Ctrl-C does not reach it: what happens then is up to the parent.
    return Popen(command, bufsize=0, stdin=stdin, stdout=stdout, env=environ, pass_fds=pass_fds, start_new_session=True)

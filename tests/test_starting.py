"""An interrupt is heard, wherever Python happens to be."""

from __future__ import annotations

import subprocess
import sys

DROPPED = """
import signal, time, weakref
from lewm import starting

class Thing: pass

starting.interrupt_on_signals()
starting.hear_lost_interrupts()
thing = Thing()
reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    print("dropped", flush=True)
    time.sleep(10)
except KeyboardInterrupt:
    print("heard")
"""


def test_an_interrupt_that_python_drops_is_heard_a_moment_later() -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=8)
    assert (done.stdout.split(), done.stderr) == (["dropped", "heard"], "")

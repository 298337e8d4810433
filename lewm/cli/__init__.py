"""The command line: `lewm VERB ...`. Each verb is a file here, imported when it is asked for."""

from __future__ import annotations

import atexit
import importlib
import os
import select
import signal
import sys
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from lewm.cli.frame import console, print_grid
from lewm.errors import ConfigError, LewmError, unknown_name
from lewm.starting import INTERRUPTED, STATUS, hear_lost_interrupts, interrupt_on_signals
from lewm.version import __version__

# What each verb does, in the order of a project; its file has the same name, and a function ``run(arguments)``.
VERBS = {
    "demo": "Collect, train, plan and report on TwoRoom, in minutes on a CPU",
    "collect": "Generate a dataset with an environment's expert",
    "train": "Train a method on a dataset",
    "eval": "Measure how often a model reaches an environment's frozen goals",
    "export": "Write a run's model for others: bf16 weights and a model card",
    "compare": "Say whether one evaluation is better than another, or just luckier",
    "understand": "Show what a model has understood: probes, films, surprise",
    "info": "Say what a checkpoint, a run or a dataset holds",
    "data": "Check, convert or show a dataset",
    "envs": "List the environments",
    "import-official": "Convert the authors' checkpoints",
}


def main() -> NoReturn:
    """Entry point of the `lewm` command."""
    # Before PyTorch is there: threads that wait for one another by spinning keep each other, and everybody else, from
    # working. With a short spin a training beside two busy neighbours on two cores is twice as fast, and as fast as
    # ever where it is alone; with none at all it would lose a quarter there.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    hear_lost_interrupts()
    status = run(sys.argv[1:])
    if status == STATUS:
        # Python remembers an interrupt that came within `exec`, as of dataclasses, and would end with another status.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run one command; returns the process's exit status."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        try:
            interrupt_on_signals()
            _dispatch(arguments)
        finally:
            sys.stdout.flush()  # here, where it is known what to do if nobody reads
        return 0
    except LewmError as error:
        errors.print(f"[bold red]Error:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        errors.print(INTERRUPTED)
        return STATUS
    except BrokenPipeError:
        if not _nobody_reads():  # a pipe to another process: that is news
            raise
        return 128 + signal.SIGPIPE


def _nobody_reads() -> bool:
    """Whether what we print to has been closed, as `| head` does. From then on, nothing is printed."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _dispatch(arguments: list[str]) -> None:
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help"):
        console.print("[bold]lewm[/]: learn a latent world model from pixels and actions, and plan in it.\n")
        print_grid((f"  [bold]lewm {name}[/]", summary) for name, summary in VERBS.items())
        console.print("\n`lewm VERB --help` says what a verb takes.")
    elif verb in ("-V", "--version"):
        console.print(f"lewm {__version__}")
    elif verb in VERBS:
        importlib.import_module(f"lewm.cli.{verb.replace('-', '_')}").run(rest)
    else:
        raise ConfigError(unknown_name("command", verb, VERBS))

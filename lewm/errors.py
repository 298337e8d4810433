"""Errors that a user can act on.

Every message says what was expected, what came, and what to do. The command line prints these without a
traceback; anything else that escapes is a bug in lewm.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LewmError(Exception):
    """Base class of everything lewm raises on purpose."""


class ConfigError(LewmError):
    """A preset, field or value that does not exist or does not fit with the others."""


class EnvError(LewmError):
    """An environment that is unknown, not installed, or asked for something it cannot do."""


class FileError(LewmError):
    """A file that cannot be read or written, is in use, or is not to be replaced."""


class BusyError(FileError):
    """A file that another process is writing."""


class DataError(LewmError):
    """A dataset that is missing, damaged, or made for something else."""


class CheckpointError(LewmError):
    """Weights that are missing, incomplete, misshapen, or written by a newer version."""


class TrainingError(LewmError):
    """A run that cannot start here, or cannot go on."""


class PlanningError(LewmError):
    """A planning request that does not fit the model, or a solver that cannot run."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names)}."

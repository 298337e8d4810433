"""Modules of the user's that make something known to lewm, named in an environment variable."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from lewm.errors import LewmError


def import_user_modules(variable: str, error: type[LewmError]) -> None:
    """Import the modules that an environment variable names, separated by commas, from wherever Python or the user is.

    error: what to raise for one that cannot be found.
    """
    for module in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
        if module in sys.modules:
            continue
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # as `python -m` has it; last, so that it hides nothing
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as missing:
            if not f"{module}.".startswith(f"{missing.name}."):  # it is there, and lacks something else
                raise
            problem = f"{variable} names the module {module!r}, which Python cannot find"
            raise error(f"{problem}. Run from its folder, or add that to PYTHONPATH.") from missing

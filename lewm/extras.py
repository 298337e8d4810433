"""Packages that only a part of lewm needs, and that a pip extra brings."""

from __future__ import annotations

import importlib
from typing import Any

from lewm.errors import ConfigError, LewmError


def import_extra(module: str, extra: str, needed: str = "This needs", error: type[LewmError] = ConfigError) -> Any:
    """A module by its dotted name; where its package is not installed, an error that names the pip extra.

    needed: how the sentence begins that says who needs the package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        remedy = f"Install it with: pip install 'lewm[{extra}]'"
        raise error(f"{needed} the package {missing.name!r}. {remedy}") from missing

"""Packages that only `lewm understand` needs: the extra of that name."""

from __future__ import annotations

import importlib
from typing import Any

from lewm.errors import ConfigError


def extra(module: str) -> Any:
    """A module of SciPy or scikit-learn, as "scipy.stats"; where it is not installed, an error names the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        remedy = "Install it with: pip install 'lewm[understand]'"
        raise ConfigError(f"This needs the package {error.name!r}. {remedy}") from error

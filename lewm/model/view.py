"""Views of modules."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def view(module: M) -> M:
    """A copy with the same parameters and children, whose children can be exchanged.

    It stays in the mode that it was made in: what runs on a view must not ask for ``training``.
    """
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied

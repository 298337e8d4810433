"""What tests of methods share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from walkers import Walkers


@pytest.fixture(scope="session")
def walkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walkers]:
    """The toy world for methods that act."""
    made = Walkers(tmp_path_factory.mktemp("walkers") / "walkers.h5")
    yield made
    made.store.close()

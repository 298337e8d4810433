"""What is not installed is named, with the extra that installs it."""

from __future__ import annotations

import sys

import pytest

from lewm.errors import ConfigError
from lewm.extras import import_extra


def test_a_package_that_is_there_is_imported_and_one_that_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_extra("json", "understand").loads("[1]") == [1]
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"'sklearn'.*lewm\[understand\]"):
        import_extra("sklearn", "understand")

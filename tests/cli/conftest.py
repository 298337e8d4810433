"""Commands, run in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lewm import cli


@dataclass(frozen=True)
class Answer:
    """What a command left on the terminal, with all white space made single."""

    status: int
    out: str
    err: str

    def assert_refused(self, *parts: str) -> None:
        """Status 1, and one sentence on stderr: no traceback, nothing on stdout."""
        assert self.status == 1
        assert self.err.startswith("Error: ")
        assert "Traceback" not in self.err
        assert self.out == ""
        for part in parts:
            assert part in self.err


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command leaves in the current folder does not stay."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def lewm(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Answer]]:
    """Runs `lewm ARGUMENTS` in this process."""

    def call(*arguments: object) -> Answer:
        try:
            status = cli.run([str(argument) for argument in arguments])
        except SystemExit as end:  # how tyro ends --help and wrong options
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Answer(status, " ".join(captured.out.split()), " ".join(captured.err.split()))

    before = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, before)

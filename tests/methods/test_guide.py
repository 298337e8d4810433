"""docs/guide/add-a-method.md, followed to the letter."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lewm

GUIDE = Path(lewm.__file__).parents[1] / "docs" / "guide" / "add-a-method.md"


def test_a_stranger_writes_a_method_along_the_guide(tmp_path: Path):
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    (code,), (commands,) = ([body for kind, body in blocks if kind == wanted] for wanted in ("python", ""))
    assert len(code.splitlines()) <= 60
    (tmp_path / "my_method.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(lewm.__file__).parents[1])}
    out = ""
    for command in commands.strip().splitlines():
        first, *rest = shlex.split(command)
        if first == "export":
            name, _, value = rest[0].partition("=")
            environment[name] = value
            continue
        assert first == "lewm"
        done = subprocess.run(
            [sys.executable, "-m", "lewm", *rest], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stderr)
        out = done.stdout
    assert "0 of 2" in out or "1 of 2" in out or "2 of 2" in out

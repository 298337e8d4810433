"""What a process may use of its machine: schedulers and containers often allow less than there is."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")  # of the file system; tests have one of their own


def cores() -> int:
    """How many cores this process may keep busy."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _cpu_quotas())]))


def free_memory() -> int:
    """Bytes of the machine's memory that this process can still take."""
    meminfo = _ROOT / "proc/meminfo"
    if not meminfo.exists():  # not Linux: what is installed is the best that can be known
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_memory_left()])


def _cpu_quotas() -> Iterator[float]:
    """Cores that each control group above this process allows, where it does not allow all."""
    for group in _groups("cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # else "max", or -1
            yield int(quota) / int(period)


def _memory_left() -> Iterator[int]:
    """Bytes that each control group above this process still has, where it has a limit."""
    names = [
        ("memory.max", "memory.current", "inactive_file"),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    for group in _groups("memory"):
        for limit, used, cached in names:
            most, now = _read(group / limit), _read(group / used)
            if most.isdecimal() and now.isdecimal():
                stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
                # Copies of files give way when memory is asked for.
                yield max(0, int(most) - int(now) + int(stat.get(cached, 0)))


def _groups(controller: str) -> Iterator[Path]:
    """The control groups above this process, of version 2 and 1, as far as they can be seen from here."""
    top = _ROOT / "sys/fs/cgroup"
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if not controllers:
            folder = top
        elif controller in controllers.split(","):
            folder = top / controller
        else:
            continue
        inside = PurePosixPath(place.lstrip("/"))
        for parent in (inside, *inside.parents):
            if (folder / parent).is_dir():
                yield folder / parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

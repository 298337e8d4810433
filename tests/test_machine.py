"""What a process may use: of cores what the scheduler gives it, of memory what its container has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lewm import machine
from lewm.machine import cores, free_memory

GIB = 2**30


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores")
def test_cores_that_others_use_do_not_count():
    """As under Slurm, which gives a job two of many."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from lewm.machine import cores; print(cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system in which 16 GiB are free, and no control group."""
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    write(tmp_path, "proc/meminfo", f"MemTotal: 999 kB\nMemAvailable:   {16 * 2**20} kB")
    return tmp_path


def write(root: Path, name: str, text: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


def test_without_limits_the_machine_is_ours(root: Path):
    assert (cores(), free_memory()) == (16, 16 * GIB)
    write(root, "proc/self/cgroup", "0::/job/step\n1:memory:/")
    for folder in ("sys/fs/cgroup", "sys/fs/cgroup/job", "sys/fs/cgroup/job/step"):
        write(root, f"{folder}/cpu.max", "max 100000")
        write(root, f"{folder}/memory.max", "max")
        write(root, f"{folder}/memory.current", 5 * GIB)
    assert (cores(), free_memory()) == (16, 16 * GIB)


def test_the_narrowest_group_decides(root: Path):
    write(root, "proc/self/cgroup", "0::/job/step")
    write(root, "sys/fs/cgroup/job/cpu.max", "250000 100000")
    write(root, "sys/fs/cgroup/job/step/cpu.max", "max 100000")
    write(root, "sys/fs/cgroup/job/memory.max", 8 * GIB)
    write(root, "sys/fs/cgroup/job/memory.current", 7 * GIB)
    write(root, "sys/fs/cgroup/job/memory.stat", f"anon 5\ninactive_file {2 * GIB}\nfile 7")
    write(root, "sys/fs/cgroup/job/step/memory.max", 100 * GIB)
    write(root, "sys/fs/cgroup/job/step/memory.current", 1 * GIB)
    assert (cores(), free_memory()) == (3, 3 * GIB)


def test_inside_a_container_the_group_is_at_the_root(root: Path):
    """The kernel tells its path outside, which is not to be seen."""
    write(root, "proc/self/cgroup", "0::/kubepods/burstable/pod5")
    write(root, "sys/fs/cgroup/cpu.max", "50000 100000")
    write(root, "sys/fs/cgroup/memory.max", 4 * GIB)
    write(root, "sys/fs/cgroup/memory.current", 1 * GIB)
    assert (cores(), free_memory()) == (1, 3 * GIB)


def test_the_first_version_of_control_groups(root: Path):
    write(root, "proc/self/cgroup", "7:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/")
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", 6 * GIB)
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", 5 * GIB)
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.stat", f"inactive_file 3\ntotal_inactive_file {GIB}")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 5 * GIB)
    write(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us", 400_000)
    write(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us", 100_000)
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1)
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", 100_000)
    assert (cores(), free_memory()) == (4, 2 * GIB)


def test_a_container_that_is_full_has_nothing_left(root: Path):
    write(root, "proc/self/cgroup", "0::/")
    write(root, "sys/fs/cgroup/memory.max", GIB)
    write(root, "sys/fs/cgroup/memory.current", 2 * GIB)
    assert free_memory() == 0

"""What memory a process has: the machine's, or its control groups'."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerllm.engine.machine import host_memory

MIB = 1 << 20
MACHINE = (8000 * MIB, 16000 * MIB)
V1_NONE = 0x7FFFFFFFFFFFF000


def _write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    _write(tmp_path, {"proc/meminfo": f"MemTotal: {16000 << 10} kB\nMemAvailable: {8000 << 10} kB\nHugePages_Total: 0"})
    return tmp_path


def test_without_groups_it_is_the_machines(root: Path) -> None:
    assert host_memory(root) == MACHINE
    _write(root, {"proc/self/cgroup": "0::/user.slice"})
    assert host_memory(root) == MACHINE
    assert host_memory(root / "nothing") == (0, 0)


@pytest.mark.parametrize("where", ["/", "/a/b", "/of/the/host"])
def test_a_limit_of_any_group_around_it_counts(root: Path, where: str) -> None:
    limited = "sys/fs/cgroup" if where != "/a/b" else "sys/fs/cgroup/a"
    _write(root, {"proc/self/cgroup": f"0::{where}"})
    _write(root, {f"{limited}/memory.max": 1000 * MIB, f"{limited}/memory.current": 600 * MIB})
    _write(root, {f"{limited}/memory.stat": f"anon 5\ninactive_file {100 * MIB}"})
    _write(root, {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": 5})
    _write(root, {"sys/fs/cgroup/a/b/memory.stat": "anon 5"})
    assert host_memory(root) == (500 * MIB, 1000 * MIB)


def test_the_older_version_of_groups_too(root: Path) -> None:
    _write(root, {"proc/self/cgroup": "11:cpu,cpuacct:/x\n5:memory:/x\n0::/"})
    for group, most in (("sys/fs/cgroup/memory", V1_NONE), ("sys/fs/cgroup/memory/x", 700 * MIB)):
        _write(root, {f"{group}/memory.limit_in_bytes": most, f"{group}/memory.usage_in_bytes": 900 * MIB})
        _write(root, {f"{group}/memory.stat": f"total_inactive_file {50 * MIB}"})
    assert host_memory(root) == (1, 700 * MIB)


def test_a_real_group_of_this_machine_is_found(root: Path) -> None:
    available, total = host_memory()
    assert 0 < available <= total

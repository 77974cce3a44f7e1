"""What a machine is: the facts that a measurement is worth nothing without."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
from typing import Any

__all__ = ["cores", "free_memory", "machine_facts"]

# Where the kernel says which driver of an accelerator is loaded.
_DRIVERS = {
    "nvidia": pathlib.Path("/proc/driver/nvidia/version"),
    "amdgpu": pathlib.Path("/sys/module/amdgpu/version"),
}


def cores() -> int:
    """CPUs that this process may use, and no more than a container's quota of them."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        count = min(count, max(1, int(quota) // int(period)))  # "max": no quota
    return count


def free_memory() -> int:
    """Bytes that new processes may take without others being swapped out.

    Counts a container's limit as well.
    """
    free = 0
    for line in pathlib.Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            free = int(rest.split()[0]) * 1024
    group = pathlib.Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text("ascii"))  # "max": no limit
        free = min(free, limit - int((group / "memory.current").read_text("ascii")))
    return max(0, free)


def machine_facts() -> dict[str, Any]:
    """CPU, memory, system and the drivers of accelerators, as the kernel tells them."""
    cpu = _colon_lines(pathlib.Path("/proc/cpuinfo"))
    system = {}
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release()
    drivers = {}
    for name, path in _DRIVERS.items():
        with contextlib.suppress(OSError):
            drivers[name] = path.read_text("utf-8", "replace").splitlines()[0]
    return {
        "architecture": platform.machine(),
        "cpu": cpu.get("model name", "unknown"),
        "microcode": cpu.get("microcode", "unknown"),
        "cores": cores(),
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "kernel": platform.release(),
        "system": system.get("PRETTY_NAME", "unknown"),
        "drivers": drivers,
    }


def _colon_lines(path: pathlib.Path) -> dict[str, str]:
    """The first value under each name of a file of `name : value` lines."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text("utf-8", "replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found.setdefault(name.strip(), value.strip())
    return found

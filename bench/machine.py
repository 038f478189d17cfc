"""A description of the machine and servers behind the figures."""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import psutil

from bench.servers import BenchServers


def machine(servers: BenchServers) -> dict[str, Any]:
    """Describe the machine, its software, and the servers' durability. Raises NotDurable."""
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(Path(tempfile.gettempdir())),
        "python": platform.python_version(),
        "uvloop": importlib.util.find_spec("uvloop") is not None,
        **servers.versions(),
        "durability": servers.durability(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _filesystem(folder: Path) -> str:
    """Return the file system of the servers' files. On a tmpfs nothing is durable, whatever the servers do."""
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "?"

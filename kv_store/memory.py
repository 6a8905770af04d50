"""How much host memory a new arena may fill, what bounds it, and what to change where that is too little."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kv_store.errors import ConfigError

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_KIB = 1024
_STRICT_OVERCOMMIT = "2"


@dataclass(frozen=True, slots=True)
class Bound:
    """num_bytes: that may still be filled. what: has so much left. remedy: what raises it."""

    num_bytes: int
    what: str
    remedy: str


def available_bytes() -> int:
    """Memory that a new mapping can fill."""
    return tightest().num_bytes


def tightest(proc: Path = PROC, cgroups: Path = CGROUPS) -> Bound:
    """The least of what the machine, the container or service, and the process's own limit leave."""
    bounds = [*_machine(proc), *_groups(proc, cgroups), *_process(proc)]
    return min(bounds, key=lambda bound: bound.num_bytes)


def check_room(arena_bytes: int, slab_bytes: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
    """Raises ConfigError, which names the missing bytes and the largest arena that fits, where this one does not."""
    bound = tightest(proc, cgroups)
    if (missing := arena_bytes - bound.num_bytes) <= 0:
        return
    most = bound.num_bytes // slab_bytes * slab_bytes
    smaller = f"choose at most --arena-bytes {most}" if most > 0 else "not one slab fits"
    raise ConfigError(
        f"--arena-bytes {arena_bytes}: {missing} bytes more than {bound.what}; {smaller}, or {bound.remedy}"
    )


def _machine(proc: Path) -> Iterator[Bound]:
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * _KIB
    yield Bound(fields["MemAvailable"], "this machine has free", "end other programs")
    mode = proc / "sys/vm/overcommit_memory"
    if mode.is_file() and mode.read_text().strip() == _STRICT_OVERCOMMIT:
        yield Bound(
            max(0, fields["CommitLimit"] - fields["Committed_AS"]),
            "this machine may still commit (vm.overcommit_memory is 2)",
            "raise vm.overcommit_ratio",
        )


def _groups(proc: Path, cgroups: Path) -> Iterator[Bound]:
    """Yield the bounds of our control group and those above it: a container's or service's limit, of version 2 or 1."""
    membership = proc / "self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _group(cgroups, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _group(cgroups / "memory", path, names)


def _group(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[Bound]:
    folder = root / path.strip("/")
    # A container sees its own group as the root, whatever the path says.
    folders = [each for each in (folder, *folder.parents) if each.is_relative_to(root) and each.is_dir()]
    limit_name, usage_name, cached_name = names
    for each in folders:
        limit_file, usage_file = each / limit_name, each / usage_name
        if not limit_file.is_file() or not usage_file.is_file():
            continue
        limit = limit_file.read_text().strip()
        if limit == "max":
            continue
        used = int(usage_file.read_text()) - _cached(each / "memory.stat", cached_name)
        yield Bound(
            max(0, int(limit) - used),
            f"the memory limit of this container or service leaves ({limit} bytes, {limit_file})",
            "raise that limit",
        )


def _cached(statistics: Path, name: str) -> int:
    """File pages that the kernel gives up before it refuses memory."""
    if not statistics.is_file():
        return 0
    values = dict(line.split() for line in statistics.read_text().splitlines())
    return int(values.get(name, 0))


def _process(proc: Path) -> Iterator[Bound]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    pages = int((proc / "self/statm").read_text().split()[0])
    yield Bound(
        max(0, limit - pages * resource.getpagesize()),
        f"the limit of this process's address space leaves ({limit} bytes)",
        "raise it (`ulimit -v unlimited`)",
    )

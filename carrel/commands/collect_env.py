"""`carrel collect-env`: facts that a bug report needs, without secrets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
from collections.abc import Callable, Mapping

from carrel.machine import cpu_name, file_text, gpus, version_of
from carrel.process.options import OptionError
from carrel.process.settings import Resolved, read
from carrel.process.version import commit, version
from carrel.serve.options import ServeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options, as carrel serve would read it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    found = describe(arguments.config, os.environ)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for heading, rows in found.items():
        print(f"{heading}:")
        for name, text in rows.items():
            print(f"  {name}: {text}")
        if not rows:
            print("  none")
    return 0


PACKAGES = (
    *("torch", "triton", "ray", "faiss-cpu", "numpy", "safetensors", "gguf", "llguidance"),
    *("transformers", "tokenizers", "huggingface_hub", "jinja2", "fastapi", "starlette", "uvicorn"),
    *("prometheus_client", "grpcio", "protobuf", "pydantic", "pydantic-settings", "opentelemetry-sdk"),
)
# of the environment, beside what Carrel itself reads
PREFIXES = (
    *("CUDA_", "GRPC_", "HF_", "LD_LIBRARY_PATH", "NCCL_", "NVIDIA_", "OMP_", "OTEL_", "PYTORCH_", "RAY_"),
    *("TORCH", "TRITON_"),
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|HEADERS|COOKIE")
_LOGIN_IN_URL = re.compile(r"//[^/@\s]+@")
MASKED = "***"
_GPU_FIELDS = "name,driver_version,memory.total,memory.free,compute_cap"
_LIMITS = {"locked memory": resource.RLIMIT_MEMLOCK, "descriptors": resource.RLIMIT_NOFILE}
_LIMITS |= {"processes": resource.RLIMIT_NPROC, "address space": resource.RLIMIT_AS}

# by heading, then by name
Description = dict[str, dict[str, str]]


def describe(config: str | None, environment: Mapping[str, str]) -> Description:
    """All that is told. config: a file of options that `carrel serve` would read."""
    return {
        "carrel": {"version": version(), "commit": commit()},
        "packages": {name: version_of(name) or "not installed" for name in PACKAGES},
        "platform": _platform(),
        # name, driver, memory in all and free, compute capability
        "gpus": {str(number): line for number, line in enumerate(gpus(_GPU_FIELDS))}
        or {"none": "nvidia-smi finds none"},
        "memory": _memory(),
        "limits": {name: _limit(kind) for name, kind in _LIMITS.items()},
        "options": _options(config),
        "environment": shown_variables(environment),
    }


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the relevant variables, with secrets masked: by a variable's name, or within a URL.

    Variables that `carrel serve` reads are shown as its options.
    """
    return {
        name: MASKED if _SECRET.search(name) else _LOGIN_IN_URL.sub(f"//{MASKED}@", text)
        for name, text in sorted(environment.items())
        if name.startswith(PREFIXES)
    }


def _platform() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "processor": cpu_name(),
        "cores": f"{os.cpu_count()}, of which this process may use {len(os.sched_getaffinity(0))}",
        "cores of the container": file_text("/sys/fs/cgroup/cpu.max") or "no limit is told",
    }


def _memory() -> dict[str, str]:
    wanted = ("MemTotal", "MemAvailable", "SwapTotal", "CommitLimit", "Committed_AS", "Hugepagesize")
    fields = dict(line.split(":", 1) for line in file_text("/proc/meminfo").splitlines() if ":" in line)
    return {
        **{name: fields[name].strip() for name in wanted if name in fields},
        "of the container": file_text("/sys/fs/cgroup/memory.max") or "no limit is told",
        "/dev/shm": _or_error(_shm),
        "vm.overcommit_memory": file_text("/proc/sys/vm/overcommit_memory"),
        "transparent huge pages": file_text("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def _shm() -> str:
    shm = os.statvfs("/dev/shm")
    gib = shm.f_frsize / 2**30
    return f"{shm.f_blocks * gib:.2f} GiB, {shm.f_bavail * gib:.2f} GiB free"


def _limit(kind: int) -> str:
    soft, hard = (
        "unlimited" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(kind)
    )
    return f"{soft}, at most {hard}"


def _options(config: str | None) -> dict[str, str]:
    """Return the options of `carrel serve` that are not the defaults, and where they were given; secrets masked."""
    try:
        resolved: Resolved[ServeOptions] = read(ServeOptions, {"config": config} if config else {})
    except OptionError as error:
        # it masks secrets too
        return {"cannot be used": str(error)}
    return resolved.shown()


def _or_error(find: Callable[[], str]) -> str:
    try:
        return find()
    except OSError as error:
        return f"not known: {error.strerror}"

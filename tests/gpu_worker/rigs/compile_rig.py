"""Compiles kernels for an H200 where there is none: Triton's interpreter accepts what its compiler refuses.

Call `compile_only` before anything else in a process without TRITON_INTERPRET; then a kernel's wrapper compiles what it
would launch for its arguments on the CPU, and launches nothing. Each program goes down to machine code once, and in its
other forms to PTX; DISABLE_LLVM_OPT=1 leaves out LLVM's passes, which are half of the work and refuse nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

# Of a program on an H200.
SHARED_BYTES = 227 << 10


class AbsentGpu:
    """The part of Triton's driver that compiling asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class AssembledOnce:
    """Puts a stage in place of Triton's last that passes each program on to it once."""

    def __init__(self) -> None:
        self._assembled: set[str] = set()

    def __call__(
        self, _backend: Any = None, stages: dict[str, Callable[..., Any]] | None = None, *_: Any
    ) -> Any:
        if stages is None:
            # asked what to tell apart in the cache of compiled programs
            return "", ""
        assemble = stages["cubin"]

        def assemble_once(ptx: str, metadata: dict[str, Any]) -> bytes:
            if metadata["name"] in self._assembled:
                return b""
            self._assembled.add(metadata["name"])
            return bytes(assemble(ptx, metadata))

        stages["cubin"] = assemble_once
        return None


def compile_only() -> None:
    triton.runtime.driver.set_active(AbsentGpu())
    triton.knobs.runtime.add_stages_inspection_hook = AssembledOnce()
    run = triton.JITFunction.run

    def compile_launch(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        # Said at the launch only, which there is none of here.
        shared = compiled.metadata.shared
        assert shared <= SHARED_BYTES, f"{self.__name__} takes {shared} bytes of shared memory"
        return compiled

    triton.JITFunction.run = compile_launch


def measure_only() -> dict[str, int]:
    """As `compile_only`, but every form goes down to machine code as it would on a GPU: the most bytes of registers
    that each program spills, by its name."""
    triton.runtime.driver.set_active(AbsentGpu())
    spilled: dict[str, int] = {}
    run = triton.JITFunction.run

    def measure(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        assert compiled.metadata.shared <= SHARED_BYTES, f"{self.__name__}: {compiled.metadata.shared}"
        name = self.__name__
        spilled[name] = max(spilled.get(name, 0), stack_bytes(compiled.asm["cubin"]))
        return compiled

    triton.JITFunction.run = measure
    return spilled


def stack_bytes(program: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", told)
    assert found, told
    return int(found[1])


def note_only() -> set[tuple[str, str]]:
    """As `compile_only`, but nothing is compiled: the set gets each program's name and a key of what would be, which is
    another one wherever Triton compiles it again."""
    triton.runtime.driver.set_active(AbsentGpu())
    noted = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        noted.add((fn.name, str(compile["key"])))
        return True

    run = triton.JITFunction.run
    triton.knobs.runtime.jit_cache_hook = note
    triton.JITFunction.run = lambda self, *args, grid, warmup, **options: run(
        self, *args, grid=grid, warmup=True, **options
    )
    return noted

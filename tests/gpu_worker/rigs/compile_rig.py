"""Compiles kernels for an H200 where there is none: Triton's interpreter accepts what its compiler refuses.

Call `compile_only` before anything else in a process without TRITON_INTERPRET; then a kernel's wrapper compiles, down
to machine code, what it would launch for its arguments on the CPU, and launches nothing.
"""

from __future__ import annotations

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


def compile_only() -> None:
    triton.runtime.driver.set_active(AbsentGpu())
    run = triton.JITFunction.run

    def compile_launch(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        # Said at the launch only, which there is none of here.
        shared = compiled.metadata.shared
        assert shared <= SHARED_BYTES, f"{self.__name__} takes {shared} bytes of shared memory"
        return compiled

    triton.JITFunction.run = compile_launch


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

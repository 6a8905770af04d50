"""A line of the table of kernels: an operation, its sizes and operands, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.kernels.base import KernelCase, Operands, Setting, load, relative_error


@dataclass(frozen=True)
class Sized:
    """An operation's operands at one size. num_bytes: the least that must be read and written.

    make: the arguments of a call, other ones each time. has_rival: False leaves the rival out, where it is too slow.
    """

    label: str
    num_bytes: int
    make: Callable[[], tuple[Any, ...]]
    is_from_host: bool = False
    has_rival: bool = True


@dataclass(frozen=True)
class Rival:
    """Something to be faster than. start: from a setting and a call's arguments to a call of its own."""

    name: str
    start: Callable[..., Callable[[], object]]


@dataclass(frozen=True)
class Operation:
    """A line of the table. package, function: in gpu_worker; kernel: the module of its Triton or CUDA code.

    over: the sizes that `sized` is asked for. off: how far outputs are off those of the reference. rival: what it is
    compared with; SAME: the reference. result: the outputs that are compared, of a call that may overwrite no argument.
    call: where a timed call is not `function(*arguments)`. reference: None: the package's.
    """

    package: str
    function: str
    over: Callable[[Setting], Iterable[Any]]
    sized: Callable[[Setting, Any], Sized]
    off: Callable[[Tensor, Tensor], float] = relative_error
    rival: Rival | None = None
    result: Callable[..., Any] = lambda run, *arguments: run(*arguments)
    call: Callable[..., object] = lambda run, *arguments: run(*arguments)
    kernel: str = "kernel"
    reference: Callable[..., Any] | None = None

    def cases(self, name: str, setting: Setting) -> Iterator[KernelCase]:
        run = setting.implementation(self.package, self.function, self.kernel)
        reference = self.reference or load(self.package, self.function)
        for size in self.over(setting):
            sized = self.sized(setting, size)
            rival = self.rival if sized.has_rival else None

            def make(sized: Sized = sized, rival: Rival | None = rival) -> Operands:
                arguments = sized.make()
                start = None
                if rival is SAME:
                    start = partial(reference, *arguments)
                elif rival is not None:
                    start = rival.start(setting, *arguments)
                return Operands(
                    partial(self.call, run, *arguments), start, lambda: self._error(run, reference, arguments)
                )

            yield KernelCase(
                name, sized.label, sized.num_bytes, make, rival and rival.name, sized.is_from_host
            )

    def _error(
        self, run: Callable[..., Any], reference: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> float:
        found, wanted = self.result(run, *arguments), self.result(reference, *arguments)
        pairs = [(found, wanted)] if isinstance(found, Tensor) else zip(found, wanted, strict=True)
        return max(self.off(one, other) for one, other in pairs)


def _never(*_: Any) -> Callable[[], object]:
    raise AssertionError("the reference is called instead")


SAME = Rival("the same in PyTorch", _never)

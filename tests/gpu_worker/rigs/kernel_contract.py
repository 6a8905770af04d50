"""The contract of every kernel: a table of operations, each with its cases, and the checks that all of them pass.

A new kernel adds one `Operation`: how its inputs are drawn, its definition, and the cases that cross its tiles.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_rig import assert_rounded
from torch import Tensor

# A call's arguments by their names, on the CPU.
Arguments = dict[str, Any]
Agree = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Arguments], None]

# Elements on each side of a tensor that must be contiguous; a multiple of any vector that a kernel reads.
MARGIN = 16


@dataclass(frozen=True)
class Case:
    """Inputs that differ from another case's in something that a kernel could get wrong.

    draw: returns the arguments, the same at every call.
    settings: values of the kernel's module for this case, by name.
    """

    draw: Callable[[], Arguments]
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def case(
    draw: Callable[..., Arguments], *values: Any, settings: Mapping[str, Any] | None = None, **options: Any
) -> Case:
    """Draw with these arguments; they are the case's label too."""
    words = [
        draw.__name__.replace("_", " ") if not values else "",
        *map(str, values),
        *(f"{name}={value}" for name, value in options.items()),
        *(settings or {}),
    ]
    label = " ".join(filter(None, words)).replace("torch.", "").replace("::", ":")
    return Case(lambda: draw(*values, **options), label, settings or {})


def split(processors: int) -> dict[str, Any]:
    """Settings of a device with so few processors: 1 gives one split of all tiles, 132 a split for each tile."""
    return {"num_processors": lambda _device: processors}


@dataclass(frozen=True)
class Refusal:
    """A call that raises ValueError, by the kernel and, unless `kernel_only`, by the reference.

    change: returns what to call with in place of the first case's arguments of the same names.
    """

    message: str
    change: Callable[[Arguments], Arguments]
    kernel_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A kernel, its reference, and its definition.

    package: has `reference` and the module `kernel`, both with `function`.
    exact: the definition, by loops or in double precision: what the function returns for these arguments; of a
        function that writes, what `writes` hold afterwards. It may skip what `agree` does not read. None: the reference
        is, which the method's own tests hold to its definition.
    strides: for an argument, how many of its leading dimensions may have any stride. A number as large as the tensor
        has dimensions also transposes it. Other arguments are contiguous.
    writes: arguments that the function writes.
    lanes: arguments that are cut to no lanes at all.
    atol, rtol: of floating-point results; 0 is to the bit.
    agree: in place of the tolerances.
    rounds_once: the kernel is the definition rounded once to its type. The reference, which may round every operation,
        is compared in float32.
    poison: around floating-point inputs; another number than NaN where the kernel leaves NaN alone.
    repeats: a second call of the kernel returns the same bits.
    captured: a step launches it, so it runs in a CUDA graph.
    """

    package: str
    function: str
    cases: tuple[Case, ...]
    exact: Callable[..., Any] | None = None
    kernel: str = "kernel"
    strides: Mapping[str, int] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    atol: float = 0.0
    rtol: float = 0.0
    agree: Agree | None = None
    rounds_once: bool = False
    poison: float = math.nan
    repeats: bool = True
    captured: bool = False

    @property
    def name(self) -> str:
        return self.function

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

    def call(self, name: str, arguments: Arguments) -> tuple[Tensor, ...]:
        """The results of `kernel` or `reference`, or what was written."""
        function = getattr(self.module(self.kernel if name == "kernel" else name), self.function)
        parameters = inspect.signature(function).parameters
        spread = [n for n, p in parameters.items() if p.kind is p.VAR_POSITIONAL]
        named = {n: value for n, value in arguments.items() if n not in spread}
        found = function(*named.values(), *arguments[spread[0]]) if spread else function(**named)
        written = (arguments[name] for name in self.writes)
        return results(written if self.writes else found)


def results(found: Any) -> tuple[Tensor, ...]:
    """The tensors of a tensor, a tuple or a record."""
    if isinstance(found, Tensor):
        return (found,)
    if dataclasses.is_dataclass(found):
        return results([getattr(found, each.name) for each in dataclasses.fields(found)])
    return tuple(each for each in found if isinstance(each, Tensor))


def poison_of(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return math.nan
    return True if dtype is torch.bool else min(10**9, torch.iinfo(dtype).max)


def placed(
    tensor: Tensor, strided: int, device: torch.device, turned: bool, poison: float = math.nan
) -> tuple[Tensor, Tensor]:
    """The tensor as a view of wider memory that holds poison everywhere else; and that memory."""
    if strided >= tensor.dim() > 1 and turned:
        view, memory = placed(tensor.permute(*range(tensor.dim())[::-1]), strided, device, False, poison)
        return view.permute(*range(tensor.dim())[::-1]), memory
    if not tensor.numel():
        # Memory of no size lies nowhere.
        return (empty := torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)), empty
    if strided and tensor.dim() == 1:
        view, memory = placed(tensor[:, None], 1, device, False, poison)
        return view[:, 0], memory
    filling = poison if tensor.is_floating_point() else poison_of(tensor.dtype)
    if strided == 0 or tensor.dim() == 0:
        shape = list(tensor.shape) or [1]
        begin, size = MARGIN, [shape[0] + 2 * MARGIN, *shape[1:]]
        memory = torch.full(size, filling, dtype=tensor.dtype, device=device)
        view = memory[begin : begin + shape[0]].view(tensor.shape)
    else:
        last = min(strided, tensor.dim() - 1)
        size = [n + 3 if dim <= last else n for dim, n in enumerate(tensor.shape)]
        memory = torch.full(size, filling, dtype=tensor.dtype, device=device)
        within = (
            slice(1 if dim < last else 0, n + (dim < last)) for dim, n in enumerate(tensor.shape[: last + 1])
        )
        view = memory[tuple(within)]
    view.copy_(tensor)
    return view, memory


class Placed:
    """Arguments on a device, each tensor amid poison."""

    def __init__(
        self, operation: Operation, arguments: Arguments, device: torch.device, turned: bool
    ) -> None:
        self._operation, self._device, self._turned = operation, device, turned
        self.memories: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}
        self.arguments = {name: self._place(name, value) for name, value in arguments.items()}
        self._before = {name: memory.clone() for name, memory in self.memories.items()}

    def _place(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            strided = self._operation.strides.get(name, 0)
            poison = self._operation.poison
            view, self.memories[name] = placed(value, strided, self._device, self._turned, poison)
            self.views[name] = view
            return view
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in dataclasses.fields(value)]
            changed = {each: self._place(f"{name}.{each}", getattr(value, each)) for each in names}
            return dataclasses.replace(value, **changed)
        if isinstance(value, tuple):
            return tuple(self._place(f"{name}.{place}", each) for place, each in enumerate(value))
        return value

    def assert_only_written(self) -> None:
        """Check that what the operation does not write, and the poison around what it writes, is as it was."""
        for name, memory in self.memories.items():
            if name in self._operation.writes:
                view = self.views[name]
                before = torch.as_strided(
                    self._before[name], view.shape, view.stride(), view.storage_offset()
                )
                before.copy_(view)
            assert same(memory, self._before[name]), f"{name} was written"


def on_device(arguments: Arguments, device: torch.device) -> Arguments:
    """The same arguments, for a call outside of the table."""
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in arguments.items()}


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit, and NaN where the other is."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def check_case(operation: Operation, place: int, device: torch.device) -> None:
    """Kernel and reference are the definition, read only what is theirs, and write only what they say."""
    one = operation.cases[place]
    drawn = widened(one.draw()) if operation.rounds_once else one.draw()
    expected = results(operation.exact(**drawn)) if operation.exact else operation.call("reference", drawn)
    found_types = []
    for name in ("kernel", "reference"):
        arguments = widened(one.draw()) if operation.rounds_once and name == "reference" else one.draw()
        given = Placed(operation, arguments, device, turned=place % 2 == 1)
        found = operation.call(name, given.arguments)
        found_types.append([(each.dtype, each.shape) for each in found])
        if operation.agree is not None:
            operation.agree(tuple(each.cpu() for each in found), expected, one.draw())
        else:
            assert_near(found, expected, operation)
        given.assert_only_written()
        # One case of four shows it as well as all do. In the same strides: for others Triton compiles another program,
        # which may sum in another order.
        if name == "kernel" and operation.repeats and place % 4 == 0:
            again = operation.call(name, Placed(operation, one.draw(), device, turned=False).arguments)
            assert all(same(first, second) for first, second in zip(found, again, strict=True))
    if operation.rounds_once:
        plain = operation.call("reference", Placed(operation, one.draw(), device, False).arguments)
        found_types[1] = [(each.dtype, each.shape) for each in plain]
    assert found_types[0] == found_types[1]


def widened(value: Any) -> Any:
    """The same numbers, those of 16 bits as float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: widened(each) for name, each in value.items()}
    return tuple(map(widened, value)) if isinstance(value, tuple) else value


def assert_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], operation: Operation) -> None:
    for each, exact in zip(found, expected, strict=True):
        assert each.shape == exact.shape
        if not each.dtype.is_floating_point:
            assert torch.equal(each.cpu().long(), exact.long())
        elif operation.rounds_once:
            assert_rounded(each.cpu(), exact.float(), each.dtype)
        elif operation.atol == operation.rtol == 0:
            assert same(each.cpu(), exact.to(each.dtype))
        else:
            torch.testing.assert_close(
                each.double().cpu(), exact.double(), atol=operation.atol, rtol=operation.rtol, equal_nan=True
            )


def check_no_lanes(operation: Operation, device: torch.device) -> None:
    arguments = operation.cases[0].draw()
    some = operation.call("kernel", Placed(operation, arguments, device, turned=False).arguments)
    cut = arguments | {name: arguments[name][:0] for name in operation.lanes}
    found = operation.call("kernel", Placed(operation, cut, device, turned=False).arguments)
    if operation.writes:
        before = results(cut[name] for name in operation.writes)
        assert all(same(one.cpu(), other) for one, other in zip(found, before, strict=True))
    else:
        shapes = [((0, *each.shape[1:]), each.dtype) for each in some]
        assert [(each.shape, each.dtype) for each in found] == shapes


def check_refusal(operation: Operation, refusal: Refusal, device: torch.device) -> None:
    for name in ("kernel",) if refusal.kernel_only else ("kernel", "reference"):
        arguments = Placed(operation, operation.cases[0].draw(), device, False).arguments
        with pytest.raises(ValueError, match=refusal.message):
            operation.call(name, arguments | refusal.change(arguments))


def check_graph(operation: Operation, place: int) -> None:
    """A captured launch, replayed with other inputs of the same shape, is what a launch of its own makes of them."""
    device, one = torch.device("cuda"), operation.cases[place]
    captured, fresh = (Placed(operation, one.draw(), device, False) for _ in range(2))
    for view in captured.views.values():
        view.zero_()
    wanted = [each.clone() for each in operation.call("kernel", fresh.arguments)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = operation.call("kernel", captured.arguments)
    # What the graph reads is written only now.
    inputs = Placed(operation, one.draw(), device, False).views
    for _ in range(2):
        for each in found if not operation.writes else ():
            each.fill_(poison_of(each.dtype))
        for name, view in captured.views.items():
            view.copy_(inputs[name])
        graph.replay()
        assert all(same(each, of_call) for each, of_call in zip(found, wanted, strict=True))

"""Marks in a device's work, a second stream, and copies that the host does not wait for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Mark:
    """Everything queued on the device's current stream so far. On a CPU that is finished when the mark is made.

    begun: an earlier mark, where what lies between has a length worth knowing.
    """

    def __init__(self, device: torch.device, begun: Mark | None = None) -> None:
        self.begun = begun
        self._device = device
        self._time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_reached(self) -> bool:
        """Asks without waiting."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Let the host wait until it is reached."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self) -> None:
        """Let the current stream wait from here on until it is reached; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two reached marks."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


class SideStream:
    """A second stream of the device; on a CPU there is none, and work is done at once."""

    def __init__(self, device: torch.device, is_first: bool = False) -> None:
        """is_first: its programs are placed before those of other streams that wait for a processor too."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1 if is_first else 0)

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        """Queue the block's work after the current stream's work so far, to run while the current stream gets more.
        Until that waits, tensors of the current stream that are read or written here must stay."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait from here on until all of it is done; the host does not wait. A capture that the
        queue took part in ends after this."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        """Let the host wait until all of it is done."""
        if self._stream is not None:
            self._stream.synchronize()


def to_host(tensor: Tensor) -> Tensor:
    """Its copy on the host, of the same shape and type, which is there once the device comes to it; a tensor on the
    host itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy, of the same shape and type. The host itself copies once, into pinned memory: from any other it would wait
    for all that is queued."""
    dtype = getattr(torch, array.dtype.name)
    copy = torch.empty(array.shape, dtype=dtype, pin_memory=device.type == "cuda")
    np.copyto(copy.numpy(), array)
    return copy.to(device, non_blocking=True)


def unowned(tensor: Tensor) -> Tensor:
    """Return the same contiguous numbers at the same place of a CUDA device, in a tensor that does not keep the memory:
    for as long as something else does. A tensor of the host as it is."""
    if not tensor.is_cuda:
        return tensor
    assert tensor.is_contiguous(), "bytes lie one behind the other"
    found = bytes_at(tensor.data_ptr(), tensor.nbytes, tensor.device)
    return found.view(tensor.dtype).view(tensor.shape)


def bytes_at(address: int, num_bytes: int, device: torch.device, owner: object = None) -> Tensor:
    """Return the bytes from an address of a CUDA device on, uint8 [num_bytes], as a tensor that keeps the owner."""
    return torch.as_tensor(_Bytes(address, num_bytes, owner), device=device)


class _Bytes:
    """Bytes of a device, as PyTorch reads them."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

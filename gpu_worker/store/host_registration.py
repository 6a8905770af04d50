"""Host memory that a GPU may read and write itself, registered with CUDA a granule at a time, within the memlock
limit."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import resource
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import bytes_at

logger = logging.getLogger(__name__)

# Registering one holds up the launches of other threads for some milliseconds once its pages are there.
GRANULE_BYTES = 128 << 20
# madvise: have the kernel give a mapping its pages now. Since Linux 5.14.
POPULATE_WRITE = 23
MEMLOCK_REMEDY = (
    "raise it (`ulimit -l unlimited`; LimitMEMLOCK=infinity of a systemd service; `ulimits: {memlock: -1}` of a "
    "container), or give --transport shm, which locks nothing and is slower"
)


class RegistrationFailed(Exception):
    """CUDA does not register the memory; the text says why."""


class HostRegistration:
    """Granules of one mapping, each registered when something in it is first needed, or before by `start`.

    A copy must not cross from one granule into the next: CUDA takes them for separate allocations. register:
    (address, bytes), raises RegistrationFailed. unregister: (address).
    """

    def __init__(
        self,
        mapping: npt.NDArray[np.uint8],
        granule_bytes: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
    ) -> None:
        self._mapping = mapping
        self.granule_bytes = granule_bytes
        self._register = register
        self._unregister = unregister
        # Both guarded by the lock.
        self._registered: set[int] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._ahead: threading.Thread | None = None

    def start(self) -> None:
        """Register all of it on a thread of its own, from the front, where the store begins: a request that comes first
        to a granule waits for its pages, some 60 ms."""
        ahead = threading.Thread(target=self._register_all, name="register arena", daemon=True)
        try:
            ahead.start()
        except RuntimeError as error:
            logger.warning("the arena is not registered ahead, but as it is needed: %s", error)
        else:
            self._ahead = ahead

    @property
    def is_settled(self) -> bool:
        """Return whether registering ahead has ended."""
        return self._ahead is None or not self._ahead.is_alive()

    def _register_all(self) -> None:
        for granule in range(-(-self._mapping.nbytes // self.granule_bytes)):
            populate(*self._extent(granule))
            # `cover` raises it again for the first sequence that needs the granule.
            with contextlib.suppress(RegistrationFailed), self._lock:
                if self._is_closed:
                    return
                self._register_once(granule)

    def _extent(self, granule: int) -> tuple[int, int]:
        """Return the address and size of a granule."""
        begin = granule * self.granule_bytes
        return self._mapping.ctypes.data + begin, min(self.granule_bytes, self._mapping.nbytes - begin)

    def _register_once(self, granule: int) -> None:
        if granule not in self._registered:
            self._register(*self._extent(granule))
            self._registered.add(granule)

    def cover(self, offsets: npt.NDArray[np.int64]) -> None:
        """Let the device reach the granules that these bytes of the mapping lie in. Raises RegistrationFailed."""
        for granule in np.unique(offsets // self.granule_bytes).tolist():
            if granule not in self._registered:
                with self._lock:
                    self._register_once(granule)

    def close(self) -> None:
        """Unregister everything; the device must be done with it, and the mapping must still exist."""
        with self._lock:
            self._is_closed = True
            for granule in self._registered:
                self._unregister(self._mapping.ctypes.data + granule * self.granule_bytes)
            self._registered.clear()
        if self._ahead is not None:
            self._ahead.join()


def populate(address: int, num_bytes: int) -> None:
    """Have the kernel give memory its pages, without the GIL; where it cannot, the first access waits."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), POPULATE_WRITE)


def register_with_cuda(
    mapping: npt.NDArray[np.uint8], granule_bytes: int, device: torch.device
) -> HostRegistration:
    """Register a mapping for every CUDA device, through the context of this one."""
    runtime = torch.cuda.cudart()

    def register(address: int, num_bytes: int) -> None:
        with torch.cuda.device(device):
            status = runtime.cudaHostRegister(address, num_bytes, 0)
        if int(status):
            _forget_error()
            reason = runtime.cudaGetErrorString(status)
            raise RegistrationFailed(f"{num_bytes} bytes of host memory cannot be registered: {reason}")

    def unregister(address: int) -> None:
        if int(runtime.cudaHostUnregister(address)):
            _forget_error()

    return HostRegistration(mapping, granule_bytes, register, unregister)


def _forget_error() -> None:
    """Read the error that CUDA keeps; otherwise the next launch would report it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def device_tensor(mapping: npt.NDArray[np.uint8], device: torch.device) -> Tensor:
    """Return the mapping as a CUDA tensor, uint8 [bytes], which keeps it. Its first byte must be registered, every
    other by the time that it is read or written. Raises RegistrationFailed where the device has another address for it.
    """
    try:
        found = bytes_at(mapping.ctypes.data, mapping.nbytes, device, owner=mapping)
    except RuntimeError as error:
        raise RegistrationFailed(f"the device does not see registered host memory: {error}") from error
    if found.data_ptr() != mapping.ctypes.data:
        raise RegistrationFailed("the device does not see registered host memory where the host does")
    return found


def allow_locking(num_bytes: int) -> None:
    """Raise the soft limit as far as needed and as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _covers(soft, num_bytes) or soft == hard:
        return
    wanted = num_bytes if _covers(hard, num_bytes) and hard != resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (wanted, hard))


def too_low(num_bytes: int) -> str | None:
    """Return the limit and how to raise it, if it is below so many bytes; else None."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _covers(soft, num_bytes):
        return None
    return f"the memlock limit is {soft} bytes, the arena has {num_bytes}: {MEMLOCK_REMEDY}"


def _covers(limit: int, num_bytes: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= num_bytes

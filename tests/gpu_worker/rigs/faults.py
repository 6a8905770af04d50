"""Faults by a seed, at the seams of a worker and of a store's disk: delays, lost calls, halves of writes, no memory."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from io import BufferedReader
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.runner.steps.decode import DecodeStep, StepResult
from kv_store.client import IndexSegment, StoreClient, StoreError, StoreFull
from kv_store.disk.folder import TierFolder, take_folder

DELAY_SECONDS = 0.002
# Methods of the store that carry rows.
TRANSFERS = frozenset({"Gather", "GatherRows", "TopK", "PutRows"})
# By a heartbeat and the first contact the worker finds its way back.
SPARED = frozenset({"Hello", "Attach", "Heartbeat", "BuildIndex", "Stats"})


class Faults:
    """Decides by draws of its own at each point and name, so that a draw changes nothing at another. Thread-safe.

    rates: share of the times at which each fault strikes, by "POINT:KIND". struck: how often each did.
    """

    def __init__(self, rates: Mapping[str, float] = {}, seed: int = 0) -> None:
        self._rates = dict(rates)
        self._seed = seed
        self._draws: dict[str, random.Random] = {}
        self._lock = threading.Lock()
        self.struck: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._rates)

    def end(self) -> None:
        """Nothing strikes any more."""
        self._rates = {}

    def strike(self, point: str, name: str = "") -> str:
        """The kind of fault that strikes this time; "" for none. A delay is over when this returns."""
        with self._lock:
            draw = self._draw(point, name).random()
            found = ""
            for fault, rate in self._rates.items():
                if fault.startswith(f"{point}:") and 0 <= draw < rate:
                    found = fault.rpartition(":")[2]
                    self.struck[fault] += 1
                draw -= rate if fault.startswith(f"{point}:") else 0
        if found == "delay":
            time.sleep(DELAY_SECONDS)
            return ""
        return found

    def choose(self, point: str, count: int, name: str = "") -> int:
        """One of so many, by the draws of this point."""
        with self._lock:
            return self._draw(point, name).randrange(count)

    def _draw(self, point: str, name: str) -> random.Random:
        return self._draws.setdefault(f"{point} {name}", random.Random(f"{self._seed} {point} {name}"))


class LostCall(grpc.RpcError):
    """The error of a call that is not answered in time, as gRPC raises it."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "lost on purpose"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class FaultyCalls(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor
):
    """Calls to the store that are late, lost before or after they were done, or cut off."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        name = details.method.rpartition("/")[2]
        kind = self._strike(name)
        if kind and self._faults.choose("store.call", 2, name):
            raise LostCall
        reply = continuation(details, request)
        if kind:
            reply.result()
            raise LostCall
        return reply

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        kind = self._strike(details.method.rpartition("/")[2])
        if kind == "drop":
            raise LostCall
        chunks = continuation(details, request)
        return _first_of(chunks) if kind == "partial" else chunks

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        kind = self._strike(details.method.rpartition("/")[2])
        if kind == "drop":
            raise LostCall
        reply = continuation(details, _head(requests) if kind == "partial" else requests)
        if kind == "partial":
            raise LostCall
        return reply

    def _strike(self, name: str) -> str:
        point = "transfer" if name in TRANSFERS else "store.call"
        return "" if name in SPARED else self._faults.strike(point, name)


def _first_of(chunks: Any) -> Iterator[Any]:
    for chunk in chunks:
        yield chunk
        break
    chunks.cancel()
    raise LostCall


def _head(requests: Iterator[Any]) -> Iterator[Any]:
    yield next(requests)


class FaultyClient(StoreClient):
    """A client whose writes stop half-way and whose indexes fail. `faults`: set once it is connected."""

    faults = Faults()

    def put(self, sequence_id: str, layer: int, token_begin: int, rows: npt.NDArray[np.uint8]) -> None:
        if self.faults.strike("arena.write"):
            if half := rows.shape[1] // 2:
                super().put(sequence_id, layer, token_begin, rows[:, :half])
            raise StoreError("a write stopped half-way, on purpose")
        super().put(sequence_id, layer, token_begin, rows)

    def build_index(self, *arguments: Any, **options: Any) -> Future[IndexSegment]:
        failed: Future[IndexSegment] = Future()
        match self.faults.strike("index"):
            case "drop":
                failed.set_exception(StoreError("an index was lost, on purpose"))
                return failed
            case "alloc":
                failed.set_exception(StoreFull("no room for an index, on purpose", missing_bytes=1))
                return failed
            case _:
                return super().build_index(*arguments, **options)


def faulty_connect(faults: Faults) -> Callable[..., StoreClient]:
    """`StoreClient.connect`, to a client with these faults."""

    def connect(*arguments: Any, **options: Any) -> StoreClient:
        client = FaultyClient.connect(*arguments, **options, interceptors=[FaultyCalls(faults)])
        client.faults = faults
        return client

    return connect


def faulty_prefill(faults: Faults) -> Callable[..., Prefill]:
    """Prompts that find no memory."""

    def made(*arguments: Any) -> Prefill:
        if faults.strike("prompt"):
            raise torch.OutOfMemoryError("no memory for a prompt, on purpose")
        return Prefill(*arguments)

    return made


class FaultyDecodeStep(DecodeStep):
    """Steps that find no memory. `faults`: set once it is made."""

    faults = Faults()

    def run(self, *arguments: Any) -> StepResult:
        if self.faults.strike("step"):
            raise torch.OutOfMemoryError("no memory for a step, on purpose")
        return super().run(*arguments)


def faulty_decode(faults: Faults) -> Callable[..., DecodeStep]:
    """Makes decode steps with these faults."""

    def made(*arguments: Any) -> DecodeStep:
        step = FaultyDecodeStep(*arguments)
        step.faults = faults
        return step

    return made


class FlippingFile:
    """A file of which bits flip while it is read."""

    def __init__(self, file: BufferedReader, faults: Faults) -> None:
        self._file = file
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FlippingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def readinto(self, room: memoryview) -> int:
        count = self._file.readinto(room)
        if self._faults.strike("disk.read") == "flip":
            room[self._faults.choose("disk.read", len(room))] ^= 0x40
        return count


class FaultyFolder(TierFolder):
    """A disk that is slow, full, or loses the end of what was written without an error."""

    def __init__(self, path: Path, faults: Faults) -> None:
        super().__init__(path, 0)
        taken = take_folder(path)
        self.path, self.descriptor = taken.path, taken.descriptor
        self._faults = faults

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        match self._faults.strike("disk.write"):
            case "alloc":
                raise OSError(errno.ENOSPC, "no space, on purpose")
            case "partial":
                data = b"".join(parts)
                parts = [data[: len(data) // 2]]
        super().write(name, parts)

    def open(self, name: str) -> Any:
        return FlippingFile(super().open(name), self._faults)

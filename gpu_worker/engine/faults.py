"""Parts of the engine with faults in them, in place of the usual ones: see `carrel.process.faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carrel.process.faults import Faults, Kind, Point
from gpu_worker.engine.prompts.in_progress import AnyPass, MakePrefill
from gpu_worker.engine.steps.decode import DecodeStep, StepResult
from gpu_worker.state.sequence import Sequence as RunningSequence
from kv_store.client import (
    IndexSegment,
    RowsWanted,
    StoreClient,
    StoreError,
    StoreFull,
)
from kv_store.client.indexes import IndexParams

Bytes = npt.NDArray[np.uint8]

# Methods of the store that carry rows.
TRANSFERS = frozenset({"Gather", "GatherRows", "TopK", "PutRows"})
# A heartbeat and the first contact are spared: by them the worker finds its way back.
SPARED = frozenset({"Hello", "Attach", "Heartbeat", "BuildIndex", "Stats"})


class LostCall(grpc.RpcError):
    """As gRPC tells of a call that nobody answered in time."""

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
        if kind is not None and self._faults.choose(Point.STORE_CALL, 2, name):
            raise LostCall
        reply = continuation(details, request)
        if kind is not None:
            reply.result()
            raise LostCall
        return reply

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        kind = self._strike(details.method.rpartition("/")[2])
        if kind is Kind.DROP:
            raise LostCall
        chunks = continuation(details, request)
        return _first_of(chunks) if kind is Kind.PARTIAL else chunks

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        kind = self._strike(details.method.rpartition("/")[2])
        if kind is Kind.DROP:
            raise LostCall
        reply = continuation(details, _head(requests) if kind is Kind.PARTIAL else requests)
        if kind is Kind.PARTIAL:
            raise LostCall
        return reply

    def _strike(self, name: str) -> Kind | None:
        point = Point.TRANSFER if name in TRANSFERS else Point.STORE_CALL
        return None if name in SPARED else self._faults.strike(point, name)


def _first_of(chunks: Any) -> Iterator[Any]:
    for chunk in chunks:
        yield chunk
        break
    chunks.cancel()
    raise LostCall


def _head(requests: Iterator[Any]) -> Iterator[Any]:
    yield next(requests)


class FaultyClient(StoreClient):
    """A client whose writes stop half-way, whose indexes fail, and under which bits of the arena flip. `faults`: set
    once it is connected."""

    faults = Faults()

    def put(self, sequence_id: str, layer: int, token_begin: int, rows: Bytes) -> None:
        if self.faults.strike(Point.ARENA_WRITE) is Kind.PARTIAL:
            if half := rows.shape[1] // 2:
                super().put(sequence_id, layer, token_begin, rows[:, :half])
            raise StoreError("a write stopped half-way, on purpose")
        super().put(sequence_id, layer, token_begin, rows)

    def gather(self, layer: int, wanted: Sequence[RowsWanted]) -> Bytes:
        if wanted and self.faults.strike(Point.ARENA_READ) is Kind.FLIP:
            item = wanted[self.faults.choose(Point.ARENA_READ, len(wanted))]
            self._flip(self._tables.get(item.sequence_id).table[layer])
        return super().gather(layer, wanted)

    def build_index(
        self,
        sequence_id: str,
        layer: int,
        token_begin: int,
        token_end: int,
        params: IndexParams,
        seed: int = 0,
        prefill_seconds: float = 0.0,
    ) -> Future[IndexSegment]:
        failed: Future[IndexSegment] = Future()
        match self.faults.strike(Point.INDEX):
            case Kind.DROP:
                failed.set_exception(StoreError("an index was lost, on purpose"))
                return failed
            case Kind.ALLOC:
                failed.set_exception(StoreFull("no room for an index, on purpose", missing_bytes=1))
                return failed
            case _:
                return super().build_index(
                    sequence_id, layer, token_begin, token_end, params, seed, prefill_seconds
                )

    def _flip(self, slab_ids: npt.NDArray[np.int32]) -> None:
        """A high bit of a number in one of these slabs."""
        choose = self.faults.choose
        slab = int(slab_ids[choose(Point.ARENA_READ, len(slab_ids))])
        place = slab * self.slab_bytes + choose(Point.ARENA_READ, self.slab_bytes)
        self.arena[place | 3] ^= np.uint8(0x40)


class FaultyDecodeStep(DecodeStep):
    """Steps that are late, or find no memory. `faults`: set once it is made."""

    faults = Faults()

    def run(self, sequences: list[RunningSequence], drawn: Tensor | None = None) -> StepResult:
        if self.faults.strike(Point.STEP) is Kind.ALLOC:
            raise torch.OutOfMemoryError("no memory for a step, on purpose")
        return super().run(sequences, drawn)


def faulty_connect(faults: Faults) -> Callable[..., StoreClient]:
    """`StoreClient.connect`, to a client with these faults; without any, itself."""
    if not faults:
        return StoreClient.connect

    def connect(*arguments: Any, **options: Any) -> StoreClient:
        client = FaultyClient.connect(*arguments, **options, interceptors=[FaultyCalls(faults)])
        client.faults = faults
        return client

    return connect


def faulty_prefill(faults: Faults, make: MakePrefill) -> MakePrefill:
    """Prompts that are late, or find no memory."""

    def made(*arguments: Any) -> AnyPass:
        if faults.strike(Point.PROMPT) is Kind.ALLOC:
            raise torch.OutOfMemoryError("no memory for a prompt, on purpose")
        return make(*arguments)

    return made


def faulty_decode(faults: Faults) -> Callable[..., DecodeStep]:
    """Makes decode steps with these faults."""

    def made(*arguments: Any) -> DecodeStep:
        step = FaultyDecodeStep(*arguments)
        step.faults = faults
        return step

    return made

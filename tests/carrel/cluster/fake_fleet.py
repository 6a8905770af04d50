"""Replicas that do as they are told, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from carrel.cluster.messages import Failure, Frame, ReplicaLost, Report
from gpu_worker.v1 import gpu_worker_pb2 as pb

INFO = pb.GetInfoResponse(version="1", model="m", vocab_size=100, max_model_len=1000, policies=["full"])


def stats(**values: int) -> pb.StatsResponse:
    return pb.StatsResponse(**{"store_reachable": True, **values})


def token(number: int) -> bytes:
    return pb.GenerateResponse(token=pb.Token(token_id=number)).SerializeToString()


COMPLETE = pb.GenerateResponse(
    complete=pb.Complete(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(completion_tokens=2))
).SerializeToString()

# what a replica's stream does: frames, or a time to be silent, or the end of the replica
Step = Frame | float | ReplicaLost


def answering(replica: str, *events: bytes, failure: Failure | None = None) -> list[Step]:
    return [Frame(replica), Frame(replica, events), Frame(replica, (), is_last=True, failure=failure)]


@dataclass
class FakeFleet:
    """`script` gives the steps of a stream by the replica that takes it, which is the wanted one."""

    known: dict[str, Report]
    script: Callable[[str], list[Step]]
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    metadata: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    aborted: list[tuple[str, str]] = field(default_factory=list)
    # what the workers reply to a short call
    replies: tuple[bytes | Failure, ...] = ()
    told: list[tuple[str, bytes]] = field(default_factory=list)

    async def generate(
        self,
        request: bytes,
        timeout_s: float,
        wanted: str,
        lost: tuple[str, ...],
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Frame, None]:
        self.metadata.append(tuple(metadata))
        self.asked.append((wanted, lost))
        replica = wanted
        try:
            for step in self.script(replica):
                match step:
                    case Frame():
                        yield step
                    case ReplicaLost():
                        raise step
                    case seconds:
                        await asyncio.sleep(seconds)
        finally:
            self.closed.append(replica)

    async def abort(self, replica: str, request_id: str) -> None:
        self.aborted.append((replica, request_id))

    async def ask_all(self, method: str, request: bytes) -> tuple[bytes | Failure, ...]:
        self.told.append((method, request))
        return self.replies

    async def reports(self) -> tuple[Report, ...]:
        return tuple(self.known.values())


def replicas(*names: str, **values: int) -> dict[str, Report]:
    return {name: Report(name, f"node of {name}", True, INFO, stats(**values)) for name in names}

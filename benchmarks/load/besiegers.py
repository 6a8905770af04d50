"""Clients that mean ill, or do not care: thousands at one server, in a process of their own."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

# How long one that never reads, and one that says nothing, stays before it comes again.
UNREAD_S, IDLE_S = 60.0, 120.0
# Between two bytes of a slow head.
BYTE_EVERY_S = 2.0
ANSWER_S = 60.0
# Answers of never-readers, which no socket's buffer holds whole.
UNREAD_TOKENS, LEFT_TOKENS = 1000, 200
WORDS = ["river", "mountain", "window", "letter", "garden", "engine", "silver", "winter", "market", "doctor"]

FIELDS = (
    *(
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "stop",
        "n",
        "stream",
        "tools",
        "carrel",
        "logprobs",
    ),
    *("response_format", "seed", "unknown"),
)
# Odd ones: numbers out of range, broken text, long lists, and objects that few fields expect.
VALUES: tuple[object, ...] = (
    *(None, True, -1, 2**31, 2**64, -(10**30), 1e300, "\u0000" * 3, 'a\n"\ud800\u202e'),
    *([], [1] * 20000, ["a"] * 1000, [[None, 0.5]], {}, {"role": {"content": -1}}),
    *({"type": "json_schema", "schema": []}, {"policy": 2**64}, {"budget": {"\ud83d": "x"}}),
)


@dataclass(frozen=True)
class Siege:
    """host, port, key, model: of the server, as those who attack it know them. seed: of all that is random."""

    host: str
    port: int
    key: str
    model: str
    seconds: float
    num_bodies: int
    num_slow: int
    num_unread: int
    num_leaving: int
    seed: str


@dataclass(frozen=True)
class Repulse:
    """Answers that the attackers got to random bodies, by status, and numbers of their sockets.

    `none`: the connection was closed without an answer. The numbers count reopened sockets: slow or idle ones, those
    that never read, and those that leave.
    """

    statuses: dict[str, int]
    num_slow: int
    num_unread: int
    num_left: int
    num_refused: int


class Besiegers:
    """All of them at once, until the time is over."""

    def __init__(self, siege: Siege) -> None:
        self._siege = siege
        self._end = time.monotonic() + siege.seconds
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._num_sent = 0

    async def run(self) -> Repulse:
        siege = self._siege
        async with asyncio.TaskGroup() as group:
            for kind, count, once in (
                ("slow", siege.num_slow, self._be_slow),
                ("unread", siege.num_unread, self._never_read),
                ("left", siege.num_leaving, self._leave),
            ):
                for number in range(count):
                    group.create_task(self._again(kind, number, once))
            for number in range(8):
                group.create_task(self._send_bodies(random.Random(f"{siege.seed}:bodies:{number}")))
        counts = self._counts
        return Repulse(
            dict(self._statuses.most_common()),
            counts["slow"],
            counts["unread"],
            counts["left"],
            counts["refused"],
        )

    @property
    def _left_s(self) -> float:
        return self._end - time.monotonic()

    async def _again(
        self, kind: str, number: int, once: Callable[[random.Random, int], Awaitable[None]]
    ) -> None:
        rng = random.Random(f"{self._siege.seed}:{kind}:{number}")
        # not all within one millisecond: the listen queue is not what is tried
        await asyncio.sleep(rng.random() * min(10.0, self._siege.seconds / 10))
        while self._left_s > 0:
            self._counts[kind] += 1
            try:
                await once(rng, number)
            except OSError:
                self._counts["refused"] += 1
            await asyncio.sleep(0.2 + rng.random())

    async def _connect(self, receive_bytes: int = 0) -> socket.socket:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        one.setblocking(False)
        if receive_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.get_running_loop().sock_connect(one, (self._siege.host, self._siege.port))
        except BaseException:
            one.close()
            raise
        return one

    async def _be_slow(self, rng: random.Random, number: int) -> None:
        """Says nothing, or a byte of a head every few seconds, until it is closed."""
        loop, one = asyncio.get_running_loop(), await self._connect()
        with one:
            until = time.monotonic() + min(IDLE_S, self._left_s)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"a" * 4096
            sent = 0
            while time.monotonic() < until:
                if number % 2:
                    await loop.sock_sendall(one, head[sent : sent + 1])
                    sent += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(BYTE_EVERY_S):
                        if not await loop.sock_recv(one, 4096):
                            return

    async def _never_read(self, rng: random.Random, number: int) -> None:
        loop, one = asyncio.get_running_loop(), await self._connect(receive_bytes=4096)
        with one:
            await loop.sock_sendall(one, self._request(self._question(rng, UNREAD_TOKENS)))
            await asyncio.sleep(min(UNREAD_S, max(0.0, self._left_s)))

    async def _leave(self, rng: random.Random, number: int) -> None:
        """After a while, mostly before its answer is over; half of them without a good-bye."""
        loop, one = asyncio.get_running_loop(), await self._connect()
        with one:
            await loop.sock_sendall(one, self._request(self._question(rng, LEFT_TOKENS)))
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.05, 5.0)):
                    while await loop.sock_recv(one, 65536):
                        pass
            if number % 2:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _send_bodies(self, rng: random.Random) -> None:
        """Its part of the bodies, spread over the time."""
        begin = self._end - self._siege.seconds
        while self._num_sent < self._siege.num_bodies and self._left_s > 0:
            due = begin + self._siege.seconds * self._num_sent / self._siege.num_bodies
            self._num_sent += 1
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._statuses[await self._status(random_body(rng, self._siege.model), rng)] += 1

    async def _status(self, body: bytes, rng: random.Random) -> str:
        """Return the status of one answer, without waiting for its body."""
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses"))
        try:
            loop, one = asyncio.get_running_loop(), await self._connect()
            with one:
                await loop.sock_sendall(one, self._request(body, path))
                async with asyncio.timeout(ANSWER_S):
                    line = await loop.sock_recv(one, 4096)
        except (OSError, TimeoutError) as error:
            return "late" if isinstance(error, TimeoutError) else "none"
        return line.split(b" ")[1].decode() if line.startswith(b"HTTP/1.1 ") else "none"

    def _question(self, rng: random.Random, max_tokens: int) -> bytes:
        body = {
            "model": self._siege.model,
            "prompt": " ".join(rng.choices(WORDS, k=60)),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(body).encode()

    def _request(self, body: bytes, path: str = "/v1/completions") -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._siege.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def random_body(rng: random.Random, model: str) -> bytes:
    """Bytes, a JSON value, or a short request of which one field has an odd value; some are cut off."""
    if (kind := rng.randrange(4)) == 0:
        return rng.randbytes(rng.randrange(1, 2000))
    body: object = rng.choice(VALUES)
    if kind > 1:
        body = {
            "model": model,
            "prompt": "a river",
            "max_tokens": rng.randrange(1, 3),
            rng.choice(FIELDS): rng.choice(VALUES),
        }
    text = json.dumps(body).encode()
    return text[: rng.randrange(len(text))] if rng.randrange(8) == 0 else text


def main() -> None:
    """A Siege as JSON on stdin, a Repulse on stdout: a process of its own, so that nobody else's clock waits."""
    siege = Siege(**json.load(sys.stdin))
    json.dump(asdict(asyncio.run(Besiegers(siege).run())), sys.stdout)


if __name__ == "__main__":
    main()

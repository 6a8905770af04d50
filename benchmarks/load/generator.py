"""A closed loop of clients: each asks again as soon as it is answered, until all requests are asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from benchmarks.load.client import LoadClient, RequestFailed
from benchmarks.load.levels import Level, RequestResult, ServeRow, summarize


async def run_level(
    client: LoadClient, model: str, level: Level, seed: str, answered: Callable[[], None]
) -> ServeRow:
    """All requests of a level. Prompts are made before the clock starts, and are of their own beyond what is shared.

    Raises BenchmarkError when the server cannot make the prompts; a request that fails is counted.
    """
    prompts = [await _prompt(client, level, f"{seed}:{index}") for index in range(level.num_requests)]
    results: list[RequestResult] = []
    errors: list[str] = []

    async def ask_until_done() -> None:
        while prompts:
            try:
                results.append(await client.complete(model, prompts.pop(), level))
            except RequestFailed as exc:
                errors.append(str(exc))
            answered()

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(level.concurrency):
            group.create_task(ask_until_done())
    return summarize(level, results, errors, time.perf_counter() - begin)


async def _prompt(client: LoadClient, level: Level, seed: str) -> list[int]:
    num_shared = min(level.num_shared_tokens, level.prompt_tokens)
    shared = await client.token_ids(num_shared, "shared") if num_shared else []
    own = level.prompt_tokens - num_shared
    return shared + (await client.token_ids(own, seed) if own else [])

"""The bundled tokenizer, a small book, and a fake worker that knows the questions of a short run."""

from __future__ import annotations

import lzma
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import grpc
import pytest
from answering_worker import LENGTH, MODEL, NUM_DOCUMENTS, FakeRun, FakeWorker, serve
from commands import Command

from carrel.evaluation.suite import Library, Suite

SEED = 7


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    (folder / "heldout").mkdir()
    rng, words = Random(0), ("the", "of", "and", "sea", "ship", "old", "man", "wind", "long", "night", "came")
    paragraphs = (
        " ".join(" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(6)) for _ in range(200)
    )
    with lzma.open(folder / "heldout" / "a-book.txt.xz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(paragraphs))
    return folder


@pytest.fixture(scope="session")
def suite(books: Path) -> Suite:
    return Suite(MODEL, Library(books), SEED)


@pytest.fixture
def fake_run(suite: Suite, books: Path, carrel: Command) -> Iterator[Callable[..., FakeRun]]:
    servers: list[grpc.Server] = []
    # short: a socket's path has 107 bytes at most
    with tempfile.TemporaryDirectory(prefix="eval-", dir="/tmp") as folder:

        def make(wrong: tuple[str, ...] = ()) -> FakeRun:
            questions = [suite.question("mixed", LENGTH, index) for index in range(NUM_DOCUMENTS)]
            worker = FakeWorker(suite.facts.codec, questions, wrong)
            server, address = serve(worker, Path(folder))
            servers.append(server)
            options = {"--model": MODEL, "--books": books, "--worker": address, "--lengths": LENGTH}
            options |= {"--documents": NUM_DOCUMENTS, "--seed": SEED, "--budgets": 0.2}
            return FakeRun(worker, carrel, options)

        yield make
        for server in servers:
            server.stop(None).wait(5)

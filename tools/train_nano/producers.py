"""Tokenises the books once and builds training batches in worker processes; no torch here."""

from __future__ import annotations

import multiprocessing as mp
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from carrel.evaluation import corpus
from carrel.evaluation.documents import Codec, TokenizedBook, tokenize_book
from carrel.evaluation.words import Pools, pools
from tools.train_nano.config import Recipe
from tools.train_nano.names import invent
from tools.train_nano.samples import SampleBuilder

QUEUE_DEPTH = 4
NUM_INVENTED = 40_000
TIMEOUT_SECONDS = 120.0


class ProducerError(Exception):
    """A worker process died or fell silent."""


@dataclass(frozen=True)
class Batch:
    """Token ids uint16 and loss classes uint8, both [sequences, context]."""

    token_ids: np.ndarray
    classes: np.ndarray


def tokenize_books(paths: list[Path], tokenizer_file: Path, folder: Path, num_workers: int) -> None:
    """Tokenises books in parallel into `folder`, three array files each."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(path, tokenizer_file, folder) for path in sorted(paths, key=lambda p: -p.stat().st_size)]
    with mp.get_context("spawn").Pool(num_workers) as pool:
        pool.starmap(_tokenize_one, jobs, chunksize=1)


def _tokenize_one(path: Path, tokenizer_file: Path, folder: Path) -> None:
    codec = Codec(Tokenizer.from_file(str(tokenizer_file)))
    book = tokenize_book(codec, corpus.read_book(path))
    np.save(folder / f"{book.name}.ids.npy", book.token_ids)
    np.save(folder / f"{book.name}.sentences.npy", book.sentence_starts)
    np.save(folder / f"{book.name}.paragraphs.npy", book.paragraph_starts)


def open_books(folder: Path) -> list[TokenizedBook]:
    """Maps the books that `tokenize_books` wrote."""
    books = []
    for path in sorted(folder.glob("*.ids.npy")):
        name = path.name.removesuffix(".ids.npy")
        arrays = [
            np.load(folder / f"{name}.{part}.npy", mmap_mode="r")
            for part in ("ids", "sentences", "paragraphs")
        ]
        books.append(TokenizedBook(name, *(np.asarray(array) for array in arrays)))
    return books


def training_pools(books: list[corpus.Book], seed: int) -> tuple[Pools, ...]:
    """The training pools, the same with words of the books, and those with invented words; no words of other splits."""
    reserved = {word.lower() for split in ("dev", "eval") for word in pools(split).words()}
    common: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for book in books:
        common.update(re.findall(r"(?<= )[a-z]{4,10}(?=[ ,.])", book.text[:400_000]))
        names.update(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,9}(?=[ ,.])", book.text[:400_000]))
    base = pools("train")
    wide = _widened(
        base,
        sorted(word for word, count in common.items() if count >= 10 and word not in reserved),
        sorted(word for word, count in names.items() if count >= 3 and word.lower() not in reserved),
    )
    invented = invent(2 * NUM_INVENTED, Random(seed), reserved)
    names_too = (word.capitalize() for word in invented[NUM_INVENTED:])
    return base, wide, _widened(wide, invented[:NUM_INVENTED], names_too)


def _widened(words: Pools, common: Iterable[str], names: Iterable[str]) -> Pools:
    """With other lower-case words and names too, and values of many lengths."""
    common, names = tuple(common), tuple(names)
    return replace(
        words,
        adjectives=words.adjectives + common,
        animals=words.animals + common,
        materials=words.materials + common,
        things=words.things + common,
        first_names=words.first_names + names,
        surnames=words.surnames + names,
        towns=words.towns + names,
        number_digits=(3, 4, 5, 5, 6, 7, 8, 10),
        hex_digits=(4, 6, 8, 8, 8, 12, 16),
    )


class Producers:
    """Worker processes that build every batch of a run, in an order that their number does not change.

    Use as a context manager; `batches` of the phases are to be asked for in order.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        tokenizer_file: Path,
        word_pools: tuple[Pools, ...],
        num_workers: int,
    ) -> None:
        context = mp.get_context("spawn")
        self.recipe, self.num_workers = recipe, num_workers
        self.first = context.Value("q", 0)  # batches before this one are no longer wanted
        self.queues = [context.Queue(QUEUE_DEPTH) for _ in range(num_workers)]
        self.workers = [
            context.Process(
                target=_produce,
                args=(recipe, folder, tokenizer_file, word_pools, place, num_workers, self.first, queue),
                daemon=True,
            )
            for place, queue in enumerate(self.queues)
        ]

    def __enter__(self) -> Producers:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.join(timeout=5)

    def batches(self, phase: int, step: int) -> Iterator[Batch]:
        """The batches of a phase from `step` on. Raises ProducerError when a worker stops answering."""
        start = sum(p.num_steps for p in self.recipe.phases[:phase])
        self.first.value = start + step
        for index in range(start + step, start + self.recipe.phases[phase].num_steps):
            yield self._get(index)

    def _get(self, index: int) -> Batch:
        queue, found = self.queues[index % self.num_workers], -1
        while found < index:
            try:
                found, token_ids, classes = queue.get(timeout=TIMEOUT_SECONDS)
            except Empty as error:
                raise ProducerError(
                    f"no batch {index} within {TIMEOUT_SECONDS:.0f} s: did a worker die?"
                ) from error
        return Batch(token_ids, classes)


def _produce(
    recipe: Recipe,
    folder: Path,
    tokenizer_file: Path,
    word_pools: tuple[Pools, ...],
    place: int,
    num_workers: int,
    first: Any,
    queue: Any,
) -> None:
    builder = SampleBuilder(
        Codec(Tokenizer.from_file(str(tokenizer_file))), open_books(folder), word_pools, recipe.pool_weights
    )
    plan = [phase for phase in recipe.phases for _ in range(phase.num_steps)]
    for index in range(place, len(plan), num_workers):
        if index < first.value:
            continue
        rng, phase = Random(f"{recipe.seed}:{index}"), plan[index]
        samples = [builder.sequence(phase, rng) for _ in range(recipe.tokens_per_step // phase.context)]
        queue.put((index, np.stack([s.token_ids for s in samples]), np.stack([s.classes for s in samples])))

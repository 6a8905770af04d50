"""Reads the book corpus: one xz-packed UTF-8 text per book, `train/` for training and `heldout/` for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from carrel.texts import read_text

SPLITS = ("train", "dev", "eval")

# Books of `train/` that no training run reads: choices are tuned on them, so that `heldout/` is only ever scored.
DEV_BOOKS = frozenset(
    {
        "jane-austen_emma",
        "jules-verne_the-mysterious-island_stephen-w-white",
        "william-james_the-varieties-of-religious-experience",
    }
)


class CorpusError(Exception):
    """The book directory is missing or holds no books of the split asked for."""


@dataclass(frozen=True)
class Book:
    """One book: its file name without suffix, and its text with paragraphs separated by blank lines."""

    name: str
    text: str


def book_paths(directory: str | Path, split: str) -> list[Path]:
    """Paths of the books of `split` ("train", "dev" or "eval") under `directory`, sorted by name.

    Raises CorpusError when the split is unknown, the directory is missing, or no book is found.
    """
    if split not in SPLITS:
        raise CorpusError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    folder = Path(directory) / ("heldout" if split == "eval" else "train")
    if not folder.is_dir():
        raise CorpusError(f"no book directory {folder}: pass the folder that holds train/ and heldout/")
    paths = sorted(folder.glob("*.txt.xz"))
    if split != "eval":
        paths = [path for path in paths if (_stem(path) in DEV_BOOKS) == (split == "dev")]
    if not paths:
        raise CorpusError(f"no books of split {split!r} (*.txt.xz) in {folder}")
    return paths


def read_book(path: Path) -> Book:
    """Reads one xz-packed book. Raises OptionError."""
    return Book(_stem(path), read_text(path))


def load(directory: str | Path, split: str) -> list[Book]:
    """Reads every book of `split`; raises CorpusError as `book_paths` does."""
    return [read_book(path) for path in book_paths(directory, split)]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".txt.xz")

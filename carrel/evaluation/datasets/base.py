"""Items of a benchmark that lies in the user's own files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.errors import EvaluationError
from carrel.evaluation.scoring import Metric


@dataclass(frozen=True)
class Item:
    """A context, which is cut in its middle where it is too long, and what stands after it."""

    context: str
    question: str
    answers: tuple[str, ...]
    metric: Metric
    max_tokens: int
    kind: str


@dataclass(frozen=True)
class Dataset(ABC):
    """How one benchmark's files are found and read. summary: which files it takes."""

    summary: str

    @abstractmethod
    def path(self, folder: Path, name: str) -> Path:
        """The file of a task in the data directory."""

    @abstractmethod
    def item(self, name: str, record: Mapping[str, Any]) -> Item:
        """One line of the file. Raises KeyError for a field that is missing, and for a task that is not known."""

    def load(self, folder: Path, name: str) -> list[Item]:
        """All items of a task. Raises EvaluationError that names the file, and what is wrong with it."""
        path, items = self.path(folder, name), list[Item]()
        try:
            for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
                items.append(self.item(name, json.loads(line)))
        except OSError as exc:
            raise EvaluationError(f"cannot read {path}: {exc.strerror}; it takes {self.summary}") from exc
        except KeyError as exc:
            raise EvaluationError(f"{path}, line {1 + len(items)}: {exc} is missing, or not known") from exc
        except (ValueError, TypeError) as exc:
            raise EvaluationError(f"{path}, line {1 + len(items)}: {exc}") from exc
        if not items:
            raise EvaluationError(f"{path} holds nothing")
        return items

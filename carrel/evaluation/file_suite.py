"""Questions of benchmarks that lie in the user's own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from carrel.errors import EvaluationError
from carrel.evaluation.datasets import DATASETS, Item
from carrel.evaluation.questions import Question

if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer

SEPARATOR = "/"


def data_file(folder: Path, task: str) -> Path:
    """The file of a task."""
    dataset, _, name = task.partition(SEPARATOR)
    return DATASETS[dataset].path(folder, name)


class FileSuite:
    """Item `index` of a file; a length only says where its context is cut."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._items: dict[str, list[Item]] = {}

    def question(self, task: str, length: int, index: int) -> Question:
        """Raises EvaluationError where there is none, or where it is too long without its context."""
        item = self._item(task, index)
        context = self._tokenizer.encode(item.context, add_special_tokens=True)
        question = self._tokenizer.encode(item.question, add_special_tokens=False)
        room = length - item.max_tokens - len(question)
        if room < 2:
            raise EvaluationError(f"{task}, item {index}: {length} tokens have no room for a context")
        if len(context) > room:
            # as LongBench cuts: what is asked, or told first, stands at the ends
            context = context[: room - room // 2] + context[len(context) - room // 2 :]
        return Question(index, item.kind, item.answers, context, question, item.max_tokens, item.metric)

    def _item(self, task: str, index: int) -> Item:
        if self._folder is None:
            raise EvaluationError(f"{task} needs --data-dir DIR, the folder of its files")
        if task not in self._items:
            dataset, _, name = task.partition(SEPARATOR)
            self._items[task] = DATASETS[dataset].load(self._folder, name)
        items = self._items[task]
        if index >= len(items):
            raise EvaluationError(f"{task} has {len(items)} items: ask for --documents {len(items)} at most")
        return items[index]

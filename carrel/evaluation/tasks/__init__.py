"""The tasks whose documents are text: for any model with a tokenizer. None needs anything to be downloaded."""

from collections.abc import Sequence

from carrel.evaluation.tasks.base import Task, Text
from carrel.evaluation.tasks.counting import COUNTING
from carrel.evaluation.tasks.filler import Filler, text_files
from carrel.evaluation.tasks.labels import LABELS
from carrel.evaluation.tasks.needles import NEEDLES, TURNS
from carrel.evaluation.tasks.reading import READING
from carrel.evaluation.tasks.tracking import TRACKING

__all__ = ["GROUPS", "TEXT_TASKS", "Filler", "Task", "Text", "expand", "text_files"]

TEXT_TASKS: dict[str, Task] = {
    **NEEDLES,
    **TRACKING,
    **COUNTING,
    **READING,
    **LABELS,
    **TURNS,
}

# what a name stands for
GROUPS = {"ruler": (*NEEDLES, *TRACKING, *COUNTING, *READING), "text": tuple(TEXT_TASKS)}


def expand(names: Sequence[str]) -> list[str]:
    """Groups as their tasks, each once."""
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))

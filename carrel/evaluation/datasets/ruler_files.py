"""RULER's ready-made prompts: a `.jsonl` for each task, `LENGTH/TASK.jsonl` or `TASK.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.evaluation.datasets.base import Dataset, Item
from carrel.evaluation.datasets.metrics import any_contained
from carrel.evaluation.scoring import contained

# Tokens of an answer by the beginning of a task's name; any of the answers will do for questions.
ANSWER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@dataclass(frozen=True)
class RulerFiles(Dataset):
    def path(self, folder: Path, name: str) -> Path:
        length, _, task = name.rpartition("/")
        return folder / length / f"{task}.jsonl"

    def item(self, name: str, record: Mapping[str, Any]) -> Item:
        kind = name.rpartition("/")[2].partition("_")[0]
        # what is asked stands in the last lines, behind the text
        context, line_break, question = str(record["input"]).rstrip().rpartition("\n")
        metric = any_contained if kind == "qa" else contained
        answers = tuple(map(str, record["outputs"]))
        return Item(context + line_break, question, answers, metric, ANSWER_TOKENS[kind], name)


RULER_FILES = RulerFiles("RULER's prompts, such as 4096/niah_single_1.jsonl")

"""InfiniteBench: a `.jsonl` for each task. The instructions are our own words; the metrics are the benchmark's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.evaluation.datasets.base import Dataset, Item
from carrel.evaluation.datasets.metrics import (
    any_contained,
    best_of,
    last_number,
    option_named,
    rouge_l,
    word_f1,
    word_said,
)
from carrel.evaluation.scoring import Metric, first_integer, first_number

# what the answer is held against, and its tokens
TASKS: dict[str, tuple[Metric, int]] = {
    "passkey": (first_integer, 6),
    "number_string": (first_integer, 12),
    "kv_retrieval": (word_said, 50),
    "math_find": (first_number, 3),
    "code_run": (last_number, 5),
    "longbook_choice_eng": (option_named, 40),
    "longbook_qa_eng": (best_of(word_f1), 40),
    "longbook_sum_eng": (best_of(rouge_l), 1200),
    "longdialogue_qa_eng": (any_contained, 40),
}


@dataclass(frozen=True)
class InfiniteBench(Dataset):
    def path(self, folder: Path, name: str) -> Path:
        return folder / f"{name}.jsonl"

    def item(self, name: str, record: Mapping[str, Any]) -> Item:
        metric, max_tokens = TASKS[name]
        found = record["answer"]
        answers = tuple(map(str, found)) if type(found) is list else (str(found),)
        asked = str(record["input"])
        if name == "longbook_choice_eng":
            options = [str(option) for option in record["options"]]
            listed = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
            asked = f"{asked}\n{listed}"
            answers = tuple(
                "ABCD"[options.index(answer)] if answer in options else answer for answer in answers
            )
        return Item(f"{record['context']}\n\n", f"{asked}\nAnswer:", answers, metric, max_tokens, name)


INFINITEBENCH = InfiniteBench("InfiniteBench's *.jsonl, such as passkey.jsonl")

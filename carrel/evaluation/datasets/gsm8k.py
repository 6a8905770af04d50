"""GSM8K: `gsm8k_test.jsonl`, asked without examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.evaluation.datasets.base import Dataset, Item
from carrel.evaluation.datasets.metrics import last_number

MARK = "####"


@dataclass(frozen=True)
class Gsm8k(Dataset):
    def path(self, folder: Path, name: str) -> Path:
        return folder / f"gsm8k_{name}.jsonl"

    def item(self, name: str, record: Mapping[str, Any]) -> Item:
        _, mark, answer = str(record["answer"]).rpartition(MARK)
        if not mark:
            raise ValueError(f"an answer without {MARK}")
        question = "Think step by step, and end with the number.\nAnswer:"
        return Item(
            f"Question: {record['question']}\n", question, (answer.strip(),), last_number, 256, "gsm8k"
        )


GSM8K = Gsm8k("gsm8k_test.jsonl")

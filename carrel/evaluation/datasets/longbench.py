"""LongBench: a `.jsonl` for each set. The instructions are our own words; the metrics are the benchmark's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.evaluation.datasets.base import Dataset, Item
from carrel.evaluation.datasets.metrics import (
    best_of,
    classes_named,
    edit_similarity,
    first_line,
    id_share,
    rouge_l,
    word_f1,
)
from carrel.evaluation.scoring import Metric

F1, ROUGE, IDS, CODE = best_of(word_f1), best_of(rouge_l), best_of(id_share), best_of(edit_similarity)
QA, SUMMARY = "Answer in a few words.\nQuestion: {input}\nAnswer:", "{input}\nSummary:"


@dataclass(frozen=True)
class Kind:
    """The sets that are asked alike. question: with the field `input` in it."""

    names: tuple[str, ...]
    question: str
    max_tokens: int
    metric: Metric


KINDS = (
    Kind(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), QA, 64, F1),
    Kind(("triviaqa",), "{input}", 32, first_line(F1)),
    Kind(("gov_report", "multi_news"), SUMMARY, 512, ROUGE),
    Kind(("qmsum",), "Query: {input}\nAnswer:", 512, ROUGE),
    Kind(("samsum",), "{input}", 128, first_line(ROUGE)),
    Kind(("passage_retrieval_en",), "Which paragraph is this of?\n{input}\nAnswer: Paragraph", 16, IDS),
    Kind(("passage_count",), "How many different paragraphs are there?\n{input}\nAnswer:", 16, IDS),
    Kind(("lcc", "repobench-p"), "{input}", 64, CODE),
)


@dataclass(frozen=True)
class LongBench(Dataset):
    def path(self, folder: Path, name: str) -> Path:
        return folder / f"{name}.jsonl"

    def item(self, name: str, record: Mapping[str, Any]) -> Item:
        asked, answers = str(record["input"]), tuple(map(str, record["answers"]))
        if name == "trec":
            metric = first_line(classes_named(tuple(record["all_classes"])))
            return Item(f"{record['context']}\n", asked, answers, metric, 64, name)
        kind = {name: kind for kind in KINDS for name in kind.names}[name]
        question = kind.question.format(input=asked)
        return Item(f"{record['context']}\n\n", question, answers, kind.metric, kind.max_tokens, name)


LONGBENCH = LongBench("LongBench's *.jsonl, such as qasper.jsonl")

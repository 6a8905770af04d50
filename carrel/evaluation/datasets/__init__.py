"""Benchmarks in the user's own files: LongBench, InfiniteBench, RULER's prompts, GSM8K. A task is BENCHMARK/FILE."""

from carrel.evaluation.datasets.base import Dataset, Item
from carrel.evaluation.datasets.gsm8k import GSM8K
from carrel.evaluation.datasets.infinitebench import INFINITEBENCH
from carrel.evaluation.datasets.longbench import LONGBENCH
from carrel.evaluation.datasets.ruler_files import RULER_FILES

__all__ = ["DATASETS", "Dataset", "Item"]

DATASETS: dict[str, Dataset] = {
    "longbench": LONGBENCH,
    "infinitebench": INFINITEBENCH,
    "ruler": RULER_FILES,
    "gsm8k": GSM8K,
}

"""Bipartite soft matching within chunks: which rows are most alike, and a round that merges them."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.chelsea.soft_matching import reference
from gpu_worker.policies.chelsea.soft_matching.reference import Matches, WeightedRows, num_matches

match_rows = by_device(reference.match_rows)
merge_rows = by_device(reference.merge_rows)

__all__ = ["Matches", "WeightedRows", "match_rows", "merge_rows", "num_matches"]

"""The calibration of outlier heads: heads whose keys have no near duplicates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.outlier_heads.scan import most_outlying, outlier_scores


def keys_with(cosines: list[float], num_sink: int, num_recent: int) -> Tensor:
    """One head whose middle is pairs of an own direction, with these cosines; sinks and window are all alike."""
    dim = 2 * len(cosines) + 1
    middle = torch.zeros(2 * len(cosines), dim)
    for pair, cosine in enumerate(cosines):
        middle[2 * pair, 2 * pair] = 3.0
        middle[2 * pair + 1, 2 * pair] = cosine
        middle[2 * pair + 1, 2 * pair + 1] = (1 - cosine**2) ** 0.5
    fixed = torch.zeros(num_sink + num_recent, dim)
    fixed[:, -1] = 1.0
    return torch.cat([fixed[:num_sink], middle, fixed[num_sink:]])[None]


def test_a_score_is_the_share_of_tokens_without_a_near_duplicate() -> None:
    alike, mixed, unlike = [0.95] * 6, [0.95, 0.5, 0.81, 0.79, 0.9, 0.85], [0.1, 0.5, 0.7, -0.9, 0.0, 0.79]
    keys = torch.cat([keys_with(cosines, 2, 3) for cosines in (alike, mixed, unlike)])
    scores = outlier_scores(keys, num_sink=2, num_recent=3, chunk=4)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor([0.0, 2 / 6, 1.0]))
    stricter = outlier_scores(keys, num_sink=2, num_recent=3, chunk=4, threshold=0.9501)
    torch.testing.assert_close(stricter, torch.ones(3))


def test_a_duplicate_in_another_chunk_does_not_count() -> None:
    keys = torch.eye(8)[None, [0, 1, 2, 3, 4, 0, 5, 2]]
    assert outlier_scores(keys, 0, 0, chunk=4).tolist() == [1.0]
    # As one chunk: of tokens 0, 2, 4, 6 two have theirs at 5 and 7.
    assert outlier_scores(keys, 0, 0, chunk=8).tolist() == [0.5]


def test_a_token_alone_in_its_chunk_is_not_asked() -> None:
    keys = torch.ones(2, 9, 4)
    keys[:, 8] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert outlier_scores(keys, 0, 0, chunk=4).tolist() == [0.0, 0.0]


def test_a_sample_without_a_middle_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 82"):
        outlier_scores(torch.zeros(2, 81, 4))
    outlier_scores(torch.ones(2, 82, 4))


def test_the_highest_scores_are_taken() -> None:
    scores = torch.zeros(4, 8)
    scores[0, 7], scores[3, 2], scores[1, 0] = 0.9, 0.8, 0.3
    assert most_outlying(scores, share=0.07) == {(0, 7), (3, 2)}
    assert most_outlying(scores, share=3 / 32) == {(0, 7), (3, 2), (1, 0)}
    # 4 % of 32 heads is one; ties go to the lower layer and head.
    assert most_outlying(scores) == {(0, 7)}
    assert most_outlying(torch.ones(4, 8), share=3 / 32) == {(0, 0), (0, 1), (0, 2)}
    assert most_outlying(scores, share=0.0) == frozenset()
    # 0.29 * 100 is a little less than 29 in binary.
    assert len(most_outlying(torch.rand(10, 10), share=0.29)) == 29
    # The paper's Llama 3.1: 256 heads.
    assert len(most_outlying(torch.rand(32, 8))) == 10

"""Observations on samples, against a dense forward pass that remembers all."""

from __future__ import annotations

import pytest
import torch
from engine_rig import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, make_model, random_prompt
from torch import Tensor

from gpu_worker.calibration import observe
from gpu_worker.calibration.observe import most_outlying, outlier_scores
from gpu_worker.errors import ModelError
from gpu_worker.kernels.prefill_attention import attend_chunk_naive
from gpu_worker.models import Decoder

SAMPLES = [list(random_prompt(230, 0)), list(random_prompt(150, 1)), list(random_prompt(320, 2))]


def progress(done: int, total: int) -> None:
    """Ignore progress."""


@torch.inference_mode()
def remembered(decoder: Decoder, sample: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Each layer's queries [H_kv, group * n, d] and keys [H_kv, n, d]."""
    positions, hidden, layers = torch.arange(len(sample)), decoder.embed(torch.tensor(sample)), []
    for layer in range(NUM_LAYERS):
        query, key, value = decoder.project_qkv(layer, hidden, positions)
        rows = torch.cat([key, value], dim=-1).transpose(0, 1)
        layers.append(
            (query.transpose(0, 1).reshape(NUM_KV_HEADS, -1, HEAD_DIM), key.transpose(0, 1).clone())
        )
        attention = attend_chunk_naive(query, rows, 0, decoder.attention_scale)
        hidden = decoder.finish_layer(layer, hidden, attention)
    return layers


@pytest.mark.parametrize("chunk", [64, 2048])
def test_a_score_is_the_mean_over_samples_whatever_their_length(chunk: int) -> None:
    decoder = make_model().decoder
    observed = observe(decoder, SAMPLES, 0.6, progress, chunk)
    every = [remembered(decoder, sample) for sample in SAMPLES]
    wanted = torch.stack(
        [
            torch.stack([outlier_scores(layers[layer][1], threshold=0.6) for layers in every]).mean(dim=0)
            for layer in range(NUM_LAYERS)
        ]
    )
    assert observed.outlier_scores.dtype == torch.float32
    # a token whose best cosine is at the threshold may fall on either side
    torch.testing.assert_close(observed.outlier_scores, wanted, atol=0.01, rtol=0)
    assert observed.outlier_scores.std() > 0.02
    stricter = observe(decoder, SAMPLES, 0.95, progress, chunk).outlier_scores
    assert (stricter >= observed.outlier_scores).all()
    assert stricter.mean() > observed.outlier_scores.mean() + 0.1


def test_the_skew_is_that_of_all_samples_together() -> None:
    decoder = make_model().decoder
    skew = observe(decoder, SAMPLES, 0.8, progress, chunk=100).skew
    assert skew.shape == (NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)
    assert skew.dtype == torch.float32
    identity = torch.eye(HEAD_DIM).expand_as(skew)
    torch.testing.assert_close(skew.transpose(2, 3) @ skew, identity, atol=1e-4, rtol=0)
    every = [remembered(decoder, sample) for sample in SAMPLES]
    for layer in range(NUM_LAYERS):
        queries = torch.cat([layers[layer][0] for layers in every], dim=1) @ skew[layer]
        keys = torch.cat([layers[layer][1] for layers in every], dim=1) @ skew[layer]
        # right singular vectors: in their directions the queries of all samples do not correlate
        gram = queries.transpose(1, 2) @ queries
        lengths = gram.diagonal(dim1=1, dim2=2)
        assert (gram - torch.diag_embed(lengths)).abs().max() < 1e-4 * lengths.max()
        along = lengths * keys.square().sum(dim=1)
        assert (along.diff(dim=1) <= 1e-4 * along[:, :1]).all()


def test_progress_counts_the_layers_of_all_samples() -> None:
    seen: list[tuple[int, int]] = []
    observe(make_model().decoder, SAMPLES[:2], 0.8, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 2 * NUM_LAYERS) for done in range(2 * NUM_LAYERS + 1)]


def test_a_model_that_overflows_is_refused() -> None:
    decoder = make_model().decoder
    decoder.layers[1].attention.qkv.matrix.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"NaN or infinity in torch\.float32"):
        observe(decoder, SAMPLES[:1], 0.8, progress)


def test_a_sample_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="take at least 82"):
        observe(make_model().decoder, [list(random_prompt(81))], 0.8, progress)


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

"""Hyper-parameters that may be set, and the errors for those that may not."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gpu_worker.policies.adakv.policy import AdaKV
from gpu_worker.policies.base import Policy
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.full.policy import Full
from gpu_worker.policies.hyper_parameters import hyper_parameters, read_options, with_options
from gpu_worker.policies.infllm.policy import InfLLM
from gpu_worker.policies.layerwise.policy import LayerWise
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.protokv.policy import ProtoKV
from gpu_worker.policies.pyramidkv.policy import PyramidKV
from gpu_worker.policies.registry import METHODS, option_names, registry
from gpu_worker.policies.scissorhands.policy import Scissorhands
from gpu_worker.policies.semantickv.policy import SemanticKV
from gpu_worker.policies.snapkv.policy import SnapKV

# What makes another policy, is a file of the calibration's, or says what is wrapped.
NOT_SET = {"names_metric", "skew_path", "inner", "sparse_prefill", "chunked", "chunk_prototypes", "hash_prototypes"} | {
    "reserve_sinks", "reserve_recent", "by_norm", "head_wise", "count_corrected",
}  # fmt: skip


@pytest.mark.parametrize("policy", registry().values(), ids=lambda policy: policy.name)
def test_every_field_of_every_policy_may_be_set_to_what_it_is(policy: Policy) -> None:
    settable = hyper_parameters(policy)
    assert set(settable) == {field.name for field in fields(policy)} - NOT_SET  # type: ignore[arg-type]
    texts = {name: str(getattr(policy, name)).replace("False", "off") for name in settable}
    assert with_options(policy, texts) == policy


def test_values_are_read_by_the_field() -> None:
    changed = with_options(SnapKV(), {"window": "64", "pooling": "avg"})
    assert changed == SnapKV(window=64, pooling="avg")
    assert with_options(Full(), {}) == Full()


@pytest.mark.parametrize(
    ("policy", "texts", "message"),
    [
        (SnapKV(), {"window": "0"}, "snapkv: window=0: give 1 to 100000"),
        (SnapKV(), {"window": "4.5"}, "snapkv: window=4.5: give 1 to"),
        (SnapKV(), {"kernel": "4"}, "snapkv: kernel=4: give an odd number, 1 to 1023"),
        (SnapKV(), {"kernel": "0"}, "kernel=0"),
        (SnapKV(), {"pooling": "min"}, "pooling=min: give max or avg"),
        (PyramidKV(), {"beta": "0.9"}, "pyramidkv: beta=0.9: give 1 to 1000"),
        (PyramidKV(), {"kernel": "4"}, "kernel=4"),
        (AdaKV(SnapKV()), {"alpha": "-0.1"}, "alpha=-0.1"),
        (AdaKV(SnapKV()), {"alpha": "1.1"}, "alpha=1.1"),
        (LayerWise(SnapKV()), {"beta": "0.5"}, "beta=0.5"),
        (Scissorhands(), {"window_size": "0"}, "window_size=0"),
        (Scissorhands(), {"window_size": "4096"}, "window_size=4096: give 1 to 4095"),
        (PQCache(), {"metric": "cosine"}, "metric=cosine: give l2 or ip"),
        (PQCache(), {"normalize": "heads"}, "normalize=heads: give candidates or all"),
        (ClusterKV(), {"metric": "dot"}, "metric=dot: give cosine or l2 or ip"),
        (ClusterKV(), {"window_clusters": "400"}, "no more than window_size, 320"),
        (InfLLM(), {"repr_topk": "200"}, "no more than block_size, 128"),
        (Chelsea(), {"chunk": "1"}, "chunk=1: give 2 to 4096"),
        (Chelsea(), {"interval_tokens": "0"}, "interval_tokens=0"),
        (Chelsea(), {"r_init": "0.6"}, "r_init=0.6: give 0 to 0.5"),
        (Chelsea(), {"r_min": "0"}, "keep 0 < r_min <= r_init <= 0.5"),
        (
            SnapKV(),
            {"size": "4"},
            "'size'; it has: window (1 to 100000), kernel (an odd number, 1 to 1023), pooling (max or avg)",
        ),
        (Full(), {"size": "4"}, "full has no option 'size'; it has: none"),
        (Chelsea(), {"r_init": "nan"}, "r_init=nan: give 0 to 0.5"),
        (SemanticKV(), {"kernel": "4"}, "kernel=4: give an odd number"),
        (SemanticKV(), {"by_norm": "off"}, "semantickv has no option 'by_norm'"),
    ],
)
def test_what_cannot_be_set_is_refused(policy: Policy, texts: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        with_options(policy, texts)
    assert message in str(caught.value)


def test_words_name_policies_and_fields() -> None:
    names = option_names()
    assert {method.name for method in METHODS} < set(names)
    words = ["quest:page_size=32", "pqcache:num_bits=5", "num_sink=4"]
    expected = {"quest": {"page_size": "32"}, "pqcache": {"num_bits": "5", "num_sink": "4"}}
    assert read_options(words, names) == expected
    for word, message in (
        ("num_bits=5", "'num_bits=5': give NAME:FIELD=VALUE"),
        ("quest:page_size", "give NAME:FIELD=VALUE"),
        ("quest:page_size=", "give NAME:FIELD=VALUE"),
        ("rest:page_size=4", "no policy 'rest' has options; choose one of adakv, "),
        ("pqcache+ip:num_bits=4", r"no policy 'pqcache\+ip' has options"),
    ):
        with pytest.raises(ValueError, match=message):
            read_options([word], names)
    with pytest.raises(ValueError, match="quest:page_size is given twice"):
        read_options(["quest:page_size=4", "page_size=5"], names)


def test_a_method_without_any_prototypes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ProtoKV(chunk_prototypes=False, hash_prototypes=False)

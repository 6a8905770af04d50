"""Every generated table by the name that its marker has."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pages import decode, others, policies, prefill, quality

TABLES: dict[str, Callable[[], str]] = {
    "methods": policies.by_themselves,
    "other-names": policies.others,
    "throughput": decode.throughput,
    "targets": decode.verdicts,
    "decode": decode.steps,
    "offload": decode.offload,
    "transformers": decode.transformers,
    "step-kernels": decode.kernels,
    "retain": decode.retain,
    "second-token": prefill.second_token,
    "own-work": prefill.own_work,
    "hot-cache": others.hot_cache,
    "paper-caches": others.paper_caches,
    "kernels": others.kernels,
    "gateway": others.gateway,
    "nodes": others.nodes,
    "cluster": others.cluster,
    "cpu": others.cpu_rivals,
    "compose-faults": others.faults,
    "compose-images": others.images,
    "quality": quality.main,
    "quality-small": quality.small,
    "quality-4k": quality.every_method(4096),
    "quality-16k": quality.every_method(16384),
    "quality-cost": quality.what_it_takes,
    "protokv": quality.protokv,
    "outliers": quality.outliers,
    "times": quality.times,
    "ablations": quality.ablations,
}

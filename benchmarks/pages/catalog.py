"""Every generated table by the name that its marker has."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pages import (
    claims,
    comparison,
    decode,
    options,
    others,
    pick,
    policies,
    prefill,
    quality,
    rooms,
    served,
    soaked,
    step_times,
)
from carrel.evaluation.tasks import GROUPS
from gateway.config import GatewayConfig
from gpu_worker.config import WorkerConfig
from kv_store.config import StoreConfig

NEEDLE = ("niah_single_2",)
RULER = tuple(task for task in (*GROUPS["ruler"], "turns") if task not in NEEDLE)

TABLES: dict[str, Callable[[], str]] = {
    "methods": policies.by_themselves,
    "other-names": policies.others,
    "serve-options": options.serve,
    "deploy-options": options.deploy,
    "gateway-options": options.own(GatewayConfig),
    "worker-options": options.own(WorkerConfig),
    "store-options": options.own(StoreConfig),
    "throughput": decode.throughput,
    "targets": decode.verdicts,
    "decode": decode.steps,
    "rooms": rooms.before_and_after,
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
    "under-load": served.under_load,
    "hit-rates": decode.hit_rates,
    "cpu": others.cpu_rivals,
    "compose-faults": others.faults,
    "compose-images": others.images,
    "quality": quality.main,
    "needles-in-brief": comparison.needles_in_brief,
    "quality-4k": quality.every_method(4096),
    "quality-16k": quality.every_method(16384),
    "quality-cost": quality.what_it_takes,
    "protokv": quality.protokv,
    "outliers": quality.outliers,
    "times": quality.times,
    "ablations": quality.ablations,
    "needles-smollm2": comparison.answers("smollm2", NEEDLE),
    "others-smollm2": comparison.answers("smollm2", NEEDLE, lengths=(4096,), of_core=False),
    "others-nano": comparison.answers(
        "nano", ("mixed",), lengths=(4096,), budgets=(0.1, 0.05), of_core=False, also="quality_all_h200"
    ),
    "ruler-smollm2": comparison.answers("smollm2", RULER, lengths=(2048,)),
    "facts-nano": comparison.answers("nano", ("mixed",)),
    "fidelity-smollm2": comparison.predictions("smollm2"),
    "fidelity-nano": comparison.predictions("nano"),
    "argmax": comparison.argmax,
    "pick": pick.table,
    "claims-heads": claims.experiments("outliers"),
    "claims-infinigen": claims.experiments("infinigen", "layers"),
    "claims-pooling": claims.experiments("pooling"),
    "claims-points": claims.experiments("points"),
    "pq-points": others.pq_points,
    "claims-clusters": claims.experiments("clusters"),
    "claims-adakv": claims.experiments("adakv"),
    "claims-chunks": claims.experiments("chunks"),
    "siege": soaked.siege,
    "soak-faults": soaked.faults,
    "soak-faults-gpu": soaked.faults_on_gpu,
    "soak-growth": soaked.growth,
    "step-times": step_times.table,
}

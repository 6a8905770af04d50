"""The policies as the worker's options want them."""

from __future__ import annotations

from gpu_worker.calibration import Calibration
from gpu_worker.config import WorkerConfig
from gpu_worker.policies import ClusterKV, Policy, PQCache, registry


def configured_policies(config: WorkerConfig, calibration: Calibration | None) -> dict[str, Policy]:
    """By name, every one; those that need a calibration only where there is one."""
    calibrated = calibration.policies(config.outlier_share, config.full_layers) if calibration else ()
    return registry(
        PQCache(
            num_subvectors=config.pq_num_subvectors,
            num_bits=config.pq_nbits,
            max_iterations=config.pq_iterations,
            metric=config.pq_metric,
        ),
        ClusterKV(tokens_per_cluster=config.clusterkv_tokens_per_cluster, metric=config.clusterkv_metric),
        *calibrated,
    )

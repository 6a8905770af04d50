"""ClusterKV: keys clustered by cosine; whole clusters are recalled, the best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, cast

import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import cluster_sizes, lloyd, sort_members
from gpu_worker.policies.base import CacheShape, Plan
from gpu_worker.policies.clusterkv.centroid_rank import centroid_rank
from gpu_worker.policies.hyper_parameters import Between, OneOf, SomeTokens, Tokens
from gpu_worker.policies.recall import Candidates, IndexJob, RecallPolicy, TrainedSegment
from kv_store.client import KMEANS_METRICS, KMeansParams

# Of a key while its segment is loaded: its label, its place among its cluster's, and the copies that a sort makes.
LOADED_BYTES = 64


@dataclass(frozen=True, slots=True)
class ClusterIndex:
    """centroids: float32 [seats, L, H_kv, C, d]. sizes: int32 [seats, L, H_kv, C], 0 where unused. labels, within:
    int32 [seats, L, H_kv, max_model_len], a position's cluster and its place in it."""

    centroids: Tensor
    sizes: Tensor
    labels: Tensor
    within: Tensor


@dataclass(frozen=True, slots=True)
class ClusterKV(RecallPolicy[ClusterIndex]):
    """All tokens; whole clusters by their centroids (Liu et al., ClusterKV, sections III and IV).

    num_sink: first tokens, never clustered. tokens_per_cluster: of the prompt, C_0 = n / 80. window_size: generated
    tokens kept whole until they are clustered among themselves, into `window_clusters`. metric: of clustering,
    "cosine", "l2" or "ip"; selection is by inner product with the centroid whatever it is. max_iterations: of K-means.
    names_metric: the policy is called by its metric too, as `clusterkv+l2`, to be served along with one of another.

    The paper iterates until convergence. 10 iterations find 0.652 of the exact best, 20 find 0.655 (carrel-nano, 8K and
    16K tokens, n/10), in half of the time.
    """

    num_sink: Tokens = 16
    tokens_per_cluster: Annotated[int, Between(2, 65536)] = 80
    window_size: SomeTokens = 320
    window_clusters: Annotated[int, Between(1, 1024)] = 4
    metric: Annotated[str, OneOf(KMEANS_METRICS)] = "cosine"
    max_iterations: Annotated[int, Between(1, 1000)] = 10
    names_metric: bool = False

    needs_index_here = False

    def __post_init__(self) -> None:
        if self.window_clusters > self.window_size:
            raise ValueError(
                f"window_clusters is {self.window_clusters}; give no more than window_size, {self.window_size}"
            )

    @property
    def name(self) -> str:
        return "clusterkv" + f"+{self.metric}" * self.names_metric

    def split(self, plan: Plan) -> Plan:
        plan = plan.split(plan.sinks(self.num_sink))
        if not plan.selects or plan.num_prompt_tokens - plan.num_sink < self.tokens_per_cluster:
            return plan.attending_all()
        return replace(plan, window_extra=True)

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        generated = num_tokens - plan.num_prompt_tokens
        return max(plan.num_sink, num_tokens - generated % self.window_size)

    def max_window(self, plan: Plan) -> int:
        return self.window_size

    def allocate(self, shape: CacheShape) -> ClusterIndex:
        windows = -(-shape.max_model_len // self.window_size)
        num_clusters = -(-shape.max_model_len // self.tokens_per_cluster) + windows * self.window_clusters
        return ClusterIndex(
            centroids=shape.seated(num_clusters, shape.head_dim, dtype=torch.float32),
            sizes=shape.seated(num_clusters, dtype=torch.int32),
            labels=shape.seated(shape.max_model_len, dtype=torch.int32),
            within=shape.seated(shape.max_model_len, dtype=torch.int32),
        )

    def prompt_job(self, plan: Plan, begin: int, end: int) -> IndexJob:
        # Iterations are not bounded: 32K tokens of a head take a core of the store 1.2 s, a GPU a fraction of a layer.
        return IndexJob(begin, end, self._params(self._num_prompt_clusters(plan)), is_quick=True)

    def leaving_job(self, plan: Plan, begin: int, end: int) -> IndexJob:
        num_windows = (begin - plan.num_prompt_tokens) // self.window_size
        num_before = self._num_prompt_clusters(plan) + num_windows * self.window_clusters
        return IndexJob(begin, end, self._params(self.window_clusters), is_quick=True, num_before=num_before)

    def _num_prompt_clusters(self, plan: Plan) -> int:
        return max(1, (plan.num_prompt_tokens - plan.num_sink) // self.tokens_per_cluster)

    def _params(self, num_clusters: int) -> KMeansParams:
        return KMeansParams(num_clusters, self.metric, self.max_iterations)

    def train(self, keys: Tensor, job: IndexJob, seed: int) -> Mapping[str, Tensor]:
        return train_kmeans(keys, cast(KMeansParams, job.params), seed)

    def training_bytes(self, keys: Tensor, job: IndexJob) -> int:
        return kmeans_bytes(keys, cast(KMeansParams, job.params))

    def load(self, index: ClusterIndex, trained: TrainedSegment) -> None:
        seat, layer, job, arrays = trained.seat, trained.layer, trained.job, trained.arrays
        centroids, labels = arrays["centroids"], arrays["labels"].long()
        num_clusters = centroids.shape[1]
        order, ends = sort_members(labels, num_clusters)
        sizes = cluster_sizes(ends)
        first = job.num_before
        if not first:
            # The prompt's segment clears what an earlier request left in the seat.
            index.sizes[seat, layer] = 0
            index.centroids[seat, layer] = 0
            index.labels[seat, layer] = 0
            index.within[seat, layer] = 0
        clusters, span = slice(first, first + num_clusters), slice(job.begin, job.end)
        index.centroids[seat, layer, :, clusters] = centroids
        index.sizes[seat, layer, :, clusters] = sizes.int()
        index.labels[seat, layer, :, span] = (labels + first).int()
        index.within[seat, layer, :, span] = _places(order, (ends - sizes).gather(1, labels))

    def load_bytes(self, num_keys: int) -> int:
        return num_keys * LOADED_BYTES

    def score(self, index: ClusterIndex, candidates: Candidates) -> Tensor:
        layer = candidates.layer
        return centroid_rank(
            candidates.query,
            index.centroids[:, layer],
            index.sizes[:, layer],
            index.labels[:, layer],
            index.within[:, layer],
            candidates.seats,
            candidates.begin,
            candidates.end,
            candidates.num_positions,
        )


def _places(order: Tensor, begins: Tensor) -> Tensor:
    """Place of every token in its cluster by ascending position: int32 [H_kv, T].

    order: of `sort_members`. begins: int64 [H_kv, T], where each token's cluster begins in it.
    """
    place = torch.arange(len(order), device=order.device)
    return (torch.empty_like(order).scatter_(0, order, place).view_as(begins) - begins).int()


def kmeans_bytes(keys: Tensor, params: KMeansParams) -> int:
    """See `RecallPolicy.training_bytes`. Keys are read where they lie, by any metric."""
    return lloyd.fit_bytes(keys, params.num_clusters)


def train_kmeans(keys: Tensor, params: KMeansParams, seed: int) -> Mapping[str, Tensor]:
    """See `RecallPolicy.train`: centroids float32 [H, C, d] and labels int32 [H, T].

    With no more tokens than clusters each token is its own, and the last fills the rest."""
    num_tokens, num_clusters = keys.shape[1], params.num_clusters
    if num_tokens <= num_clusters:
        own = torch.arange(num_clusters, device=keys.device).clamp(max=num_tokens - 1)
        labels = torch.arange(num_tokens, device=keys.device, dtype=torch.int32)
        return {"centroids": keys[:, own].float(), "labels": labels.expand(keys.shape[0], -1)}
    iterations = params.max_iterations or lloyd.DEFAULT_ITERATIONS
    centroids, sizes = lloyd.fit(keys, num_clusters, iterations, seed, params.metric)
    # By cosine, what has no member is no mean, and must not get one now.
    labels = lloyd.assign(keys, centroids, params.metric, sizes if params.metric == "cosine" else None)
    return {"centroids": centroids.means, "labels": labels}

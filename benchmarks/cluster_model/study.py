"""From one case to its rows: what the cluster can do, and how long requests take at shares of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.cluster_model.figures import ClusterRow, row_of
from benchmarks.cluster_model.measured import Measured
from benchmarks.cluster_model.parameters import ClusterParameters, Mix
from benchmarks.cluster_model.simulation import Cluster, ClusterCase, Outcome
from benchmarks.cluster_model.traffic import arrivals, prefixes_of

# what is offered to find out what can be done, times what could be done as far as is known
OVERLOAD = 1.15
ROUNDS = 4
# of a run's arrivals, those before the window
WARM_UP = 0.3


@dataclass(frozen=True)
class Study:
    """How much is simulated: requests for each GPU, so many in all at least; and the seed of all that is random."""

    measured: Measured
    parameters: ClusterParameters
    requests_per_gpu: int
    seed: int
    least_requests: int = 8000

    def rows(self, case: ClusterCase, loads: tuple[float, ...]) -> Iterator[ClusterRow]:
        """What the cluster does when more is asked than it can do, then at shares of that."""
        most = self.capacity(case)
        yield most
        for load in loads:
            yield self._row(replace(case, load=load), load * most.requests_per_s)

    def capacity(self, case: ClusterCase) -> ClusterRow:
        """Offered more than can be done, however little that is."""
        rate = OVERLOAD * case.num_gpus / self._least_prefill_s(case.mix)
        row = self._row(case, rate)
        for _ in range(ROUNDS - 1):
            # a run that is far too fast may end before anybody is answered
            rate = min(rate, max(OVERLOAD * row.requests_per_s, rate / 8))
            row = self._row(case, rate)
        return row

    def _row(self, case: ClusterCase, rate: float) -> ClusterRow:
        return row_of(case, self.simulate(case, rate), self.measured, self.parameters)

    def simulate(self, case: ClusterCase, rate: float) -> Outcome:
        """`rate` requests a second; until all are answered, or with more than can be done until the last has come."""
        count = max(self.least_requests, self.requests_per_gpu * case.num_gpus)
        prefixes = prefixes_of(case.mix, self.parameters, case.num_gpus)
        requests = list(arrivals(case.mix, prefixes, rate, count, self.seed))
        begin, end = WARM_UP * requests[-1].arrival, requests[-1].arrival
        cluster = Cluster(case, self.measured, self.parameters)
        cluster.place(prefix for of_kind in prefixes for prefix in of_kind)
        return cluster.run(requests, begin, end, drains=case.load is not None)

    def _least_prefill_s(self, mix: Mix) -> float:
        """Of a request on average, with every known prefix at hand and no request decoding."""
        seconds = 0.0
        for kind, share in zip(mix.kinds, mix.shares, strict=True):
            known = self.parameters.prefix_tokens(kind)
            alone = self.measured.prefill.seconds(kind.prompt_tokens)
            rest = self.measured.prefill.seconds(kind.prompt_tokens, known)
            seconds += share * (mix.repeated * rest + (1 - mix.repeated) * alone)
        return seconds / sum(mix.shares)

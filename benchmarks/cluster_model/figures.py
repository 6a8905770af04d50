"""The figures of a run: throughput, times, use of resources, and what requests waited for."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cluster_model.measured import Measured
from benchmarks.cluster_model.parameters import CHAT, ClusterParameters
from benchmarks.cluster_model.replica import Totals
from benchmarks.cluster_model.simulation import ClusterCase, Outcome
from benchmarks.cluster_model.traffic import Request
from benchmarks.load.levels import Percentiles

NONE = "nothing"
# of all requests' time: below it requests hardly waited
LEAST_WAIT_S = 1e-3


@dataclass(frozen=True)
class Utilisation:
    """Shares of what there is, mean over time and replicas.

    gateway: of its cores. prefill, decode: share of the time in which a prompt was under way, or requests decoded
    (both may be: steps and quanta take turns). seats, gpu_memory, host_memory: held by live requests; host_used: with
    kept prefixes.
    """

    gateway: float
    prefill: float
    decode: float
    seats: float
    gpu_memory: float
    host_memory: float
    host_used: float


@dataclass(frozen=True)
class ClusterRow:
    """One simulated run. Times are of requests that came in the window, and None where the run was cut off.

    reused: of the prompts' tokens, those not computed. chat_ttft_s: of the shortest kind alone. waiting: mean number of
    requests that wait, by what for. saturates: what most of them wait for. gateways_needed: cores that the throughput
    would keep busy.
    """

    case: ClusterCase
    requests_per_s: float
    tokens_per_s: float
    computed_tokens_per_s: float
    reused: float
    ttft_s: Percentiles | None
    chat_ttft_s: Percentiles | None
    tpot_ms: Percentiles | None
    host_gib_per_gpu: float
    gateways_needed: float
    used: Utilisation
    waiting: dict[str, float]
    saturates: str


def row_of(
    case: ClusterCase, outcome: Outcome, measured: Measured, parameters: ClusterParameters
) -> ClusterRow:
    """The figures of one run's window."""
    window_s, num_gpus = outcome.window_s, case.num_gpus
    whole = window_s * num_gpus
    totals = outcome.totals

    def share(name: str, of: float) -> float:
        return float(sum(getattr(one, name) for one in totals) / of)

    arena_tokens = int(parameters.host_bytes * parameters.arena_share) // measured.token_bytes
    used = Utilisation(
        gateway=outcome.gateway_s / window_s / case.num_gateways,
        prefill=share("prefill_s", whole),
        decode=share("decode_s", whole),
        seats=share("seat_s", whole * parameters.max_num_seqs),
        gpu_memory=share("slot_s", whole * measured.slot_tokens),
        host_memory=share("leased_s", whole * arena_tokens),
        host_used=share("used_s", whole * arena_tokens),
    )
    computed, known = _sum(totals, "computed_tokens"), _sum(totals, "known_tokens")
    waiting = {cause: seconds / window_s for cause, seconds in outcome.waiting_s.items()}
    longest = max(waiting, key=lambda cause: waiting[cause])
    # where some were left without an answer, times of the others would say little
    counted = [
        one
        for one in outcome.requests
        if not outcome.num_unfinished and outcome.begin <= one.arrival <= outcome.end
    ]
    return ClusterRow(
        case=case,
        requests_per_s=share("first_tokens", window_s),
        tokens_per_s=share("output_tokens", window_s),
        computed_tokens_per_s=computed / window_s,
        reused=known / (known + computed) if known else 0.0,
        ttft_s=_ttft(counted),
        chat_ttft_s=_ttft([one for one in counted if one.kind.name == CHAT.name]),
        tpot_ms=Percentiles.of(1000 * _token_s(one) for one in counted if one.kind.output_tokens > 1),
        host_gib_per_gpu=share("used_s", whole) * measured.token_bytes / 2**30,
        gateways_needed=share("first_tokens", window_s) * outcome.work_s,
        used=used,
        waiting=waiting,
        saturates=longest if waiting[longest] > LEAST_WAIT_S else NONE,
    )


def _ttft(requests: list[Request]) -> Percentiles | None:
    return Percentiles.of(one.first_token - one.arrival for one in requests)


def _token_s(request: Request) -> float:
    """Of each token after the first."""
    return (request.finished - request.first_token) / (request.kind.output_tokens - 1)


def _sum(totals: list[Totals], name: str) -> float:
    return float(sum(getattr(one, name) for one in totals))

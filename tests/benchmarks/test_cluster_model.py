"""The model of a cluster: what goes in comes out, one request costs what the formula says, causes are told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cluster_model.arena import Arena
from benchmarks.cluster_model.figures import ClusterRow, row_of
from benchmarks.cluster_model.measured import Measured, PrefillTime, StepTime, read_measured
from benchmarks.cluster_model.parameters import CHAT, DOCUMENT, LONG, MIXES, ClusterParameters, Mix, Routing
from benchmarks.cluster_model.simulation import GATEWAY, Cluster, ClusterCase, Outcome
from benchmarks.cluster_model.study import Study
from benchmarks.cluster_model.traffic import Request, arrivals, prefixes_of
from benchmarks.load.gateway_cost import GatewayCost, GatewayLevel, GatewayRow
from benchmarks.report import render
from benchmarks.shapes import SHAPES

PARAMETERS = ClusterParameters(prefixes_per_gpu=2.0)
MEASURED = Measured(
    policy="pqcache",
    step=StepTime(5.0, 0.1, 0.002, 0.0),
    prefill=PrefillTime(SHAPES["llama-3.1-8b"], 32768, 1600.0),
    gateway=GatewayCost(2000.0, 2.0, 100.0),
    from_host_bytes_per_s=50e9,
    token_bytes=131072,
    slot_tokens=800_000,
    num_layers=32,
    sources={},
)
MIX = MIXES["mixed"]


def simulate(
    num_gpus: int = 4,
    rate: float = 1.0,
    mix: Mix = MIX,
    routing: Routing = Routing.AFFINITY,
    parameters: ClusterParameters = PARAMETERS,
    measured: Measured = MEASURED,
    num_gateways: int = 4,
    count: int = 400,
    seed: int = 1,
) -> Outcome:
    case = ClusterCase(num_gpus, num_gateways, mix, routing, "pqcache", 1.0)
    prefixes = prefixes_of(mix, parameters, num_gpus)
    cluster = Cluster(case, measured, parameters)
    return cluster.run(arrivals(mix, prefixes, rate, count, seed))


def figures(
    outcome: Outcome, mix: Mix = MIX, num_gateways: int = 4, parameters: ClusterParameters = PARAMETERS
) -> ClusterRow:
    case = ClusterCase(len(outcome.totals), num_gateways, mix, Routing.AFFINITY, "pqcache", 1.0)
    return row_of(case, outcome, MEASURED, parameters)


def computed(outcome: Outcome) -> int:
    return sum(totals.computed_tokens for totals in outcome.totals)


@pytest.mark.parametrize("routing", list(Routing))
def test_what_goes_in_comes_out(routing: Routing) -> None:
    outcome = simulate(routing=routing, rate=3.0)
    assert outcome.num_unfinished == 0
    for request in outcome.requests:
        assert request.arrival < request.routed <= request.ready <= request.admitted < request.first_token
        assert request.first_token < request.finished
    asked = sum(request.kind.output_tokens for request in outcome.requests)
    assert sum(totals.output_tokens for totals in outcome.totals) == pytest.approx(asked)
    prompts = sum(request.kind.prompt_tokens for request in outcome.requests)
    assert computed(outcome) + sum(totals.known_tokens for totals in outcome.totals) == prompts
    assert sum(totals.first_tokens for totals in outcome.totals) == len(outcome.requests)


def test_one_request_alone_takes_what_the_formula_says() -> None:
    cluster = Cluster(ClusterCase(1, 1, MIX, Routing.AFFINITY, "pqcache", 1.0), MEASURED, PARAMETERS)
    (request,) = cluster.run([Request(0, DOCUMENT, 2.0)]).requests
    gateway_s = (2000 + 2 * 32768 + 100 * 300) / 1e6
    # 32768 is the length that was measured
    assert request.first_token == pytest.approx(2.0 + gateway_s + 1.6)
    step_s = (5.0 + 0.1 + 0.002 * (32768 + 150) / 1024) / 1000
    assert request.finished == pytest.approx(request.first_token + 299 * step_s)


def test_steps_and_quanta_take_turns() -> None:
    cluster = Cluster(ClusterCase(1, 1, MIX, Routing.AFFINITY, "pqcache", 1.0), MEASURED, PARAMETERS)
    # the second comes while the first decodes, and is prefilled while it still does
    first, second = cluster.run([Request(0, LONG, 0.0), Request(1, CHAT, 15.0)]).requests
    alone_s = MEASURED.prefill.seconds(CHAT.prompt_tokens)
    step_s = MEASURED.step.ms(1, first.mean_context) / 1000
    # one chunk, so a quantum for each of 32 layers, and a step after each
    assert second.first_token - second.admitted == pytest.approx(alone_s + 32 * step_s)


def test_a_prefix_is_read_from_the_host_and_not_computed() -> None:
    tokens = PARAMETERS.prefix_tokens(DOCUMENT)
    # nine tenths, in whole slabs
    assert tokens == 29184
    cluster = Cluster(ClusterCase(1, 1, MIX, Routing.AFFINITY, "pqcache", 1.0), MEASURED, PARAMETERS)
    both = [Request(index, DOCUMENT, 100.0 * index, prefix=7, prefix_tokens=tokens) for index in range(2)]
    first, second = cluster.run(both).requests
    assert first.first_token - first.admitted == pytest.approx(1.6)
    rest_s = MEASURED.prefill.seconds(32768, tokens) + tokens * 131072 / 50e9
    assert second.first_token - second.admitted == pytest.approx(rest_s)
    assert rest_s < 0.5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("host_bytes", [2**37, 2**36])
def test_affinity_never_raises_prefill_work(seed: int, host_bytes: int) -> None:
    parameters = replace(PARAMETERS, host_bytes=host_bytes)
    by_affinity, again = (
        computed(simulate(num_gpus=8, rate=4.0, routing=routing, parameters=parameters, seed=seed))
        for routing in (Routing.AFFINITY, Routing.COMPUTED)
    )
    assert by_affinity <= again
    if host_bytes == 2**37:
        assert by_affinity < 0.9 * again


def test_another_rate_changes_times_only() -> None:
    prefixes = prefixes_of(MIX, PARAMETERS, 4)
    slow, fast = (list(arrivals(MIX, prefixes, rate, 50, 1)) for rate in (1.0, 10.0))
    assert [one.kind for one in slow] == [one.kind for one in fast]
    assert [one.prefix for one in slow] == [one.prefix for one in fast]
    assert [one.arrival for one in slow] == pytest.approx([10 * one.arrival for one in fast])
    assert slow[-1].arrival == pytest.approx(50, rel=0.5)


# each with plenty of everything but one thing
CONSTRUCTED = {
    "prefill": (MEASURED, PARAMETERS, Mix("documents", (0.0, 1.0, 0.0), repeated=0.0), 4),
    "seats": (
        MEASURED,
        replace(PARAMETERS, max_num_seqs=2),
        Mix("answers", (1.0, 0.0, 0.0), 0.0, answers=10),
        4,
    ),
    "GPU memory": (
        replace(MEASURED, slot_tokens=40_000),
        PARAMETERS,
        Mix("answers", (0.0, 1.0, 0.0), 0.0, answers=20),
        4,
    ),
    "host memory": (
        MEASURED,
        replace(PARAMETERS, host_bytes=int(40_000 * 131072 / 0.85)),
        Mix("answers", (0.0, 1.0, 0.0), 0.0, answers=20),
        4,
    ),
    GATEWAY: (replace(MEASURED, gateway=GatewayCost(500_000.0, 2.0, 100.0)), PARAMETERS, MIXES["chat"], 1),
}


@pytest.mark.parametrize("cause", list(CONSTRUCTED))
def test_what_saturates_is_found(cause: str) -> None:
    measured, parameters, mix, num_gateways = CONSTRUCTED[cause]
    study = Study(measured, parameters, 100, 1, least_requests=400)
    row = study.capacity(ClusterCase(4, num_gateways, mix, Routing.AFFINITY, "pqcache"))
    assert row.saturates == cause
    used = {
        "prefill": row.used.prefill,
        "seats": row.used.seats,
        "GPU memory": row.used.gpu_memory,
        "host memory": row.used.host_memory,
        GATEWAY: row.used.gateway,
    }
    assert used[cause] > 0.75


def test_little_load_leaves_nobody_waiting() -> None:
    row = figures(simulate(num_gpus=8, rate=0.001, count=50))
    assert row.saturates == "nothing"
    assert row.used.prefill < 0.05


def test_an_arena_stores_a_prefix_once_and_drops_the_oldest_that_nobody_uses() -> None:
    dropped: list[int] = []
    arena = Arena(100, dropped.append)
    assert arena.take(10, 1, 30)
    assert arena.take(10, 1, 30)
    assert (arena.leased, arena.used) == (50, 50)
    assert arena.keep(2, 40)
    assert not arena.keep(3, 20)
    # 2 goes, for 1 is in use
    assert arena.take(5, 3, 30)
    assert dropped == [2]
    assert (arena.leased, arena.used) == (85, 85)
    assert not arena.take(16, -1, 0)
    arena.release(10, 1)
    arena.release(10, 1)
    assert (arena.leased, arena.used) == (35, 65)
    assert arena.holds(1)
    assert arena.take(60, -1, 0)
    assert dropped == [2, 1]


def test_a_fitted_step_is_what_it_was_made_of() -> None:
    steps = [
        (batch, context, 5 + 0.1 * batch + 0.002 * batch * context / 1024)
        for batch, context in ((1, 32768), (8, 32768), (24, 32768), (1, 131072), (6, 131072))
    ]
    found = StepTime.fitted(steps)
    assert (found.fixed_ms, found.sequence_ms, found.context_ms) == pytest.approx((5, 0.1, 0.002))
    assert found.error < 1e-9


def test_committed_figures_are_read_and_met() -> None:
    measured = read_measured("pqcache", ClusterParameters())
    assert measured.step.error < 0.05
    assert measured.prefill.seconds(32768) == pytest.approx(1.428, abs=1e-3)
    assert measured.prefill.seconds(65536) > 2 * measured.prefill.seconds(32768)
    assert measured.token_bytes == 131072
    assert 700_000 < measured.slot_tokens < 1_000_000


def test_a_gateways_cost_is_told_apart() -> None:
    def row(words: int, output: int, prompt: int, cpu_s: float) -> GatewayRow:
        return GatewayRow(GatewayLevel(words, output, 10, 2), prompt, cpu_s, 1.0)

    # ten requests of 3 ms, 2 us a prompt token and 100 us a generated one
    plain, answered, prompted = (
        row(*sizes, 10 * (3e-3 + 2e-6 * sizes[2] + 1e-4 * sizes[1]))
        for sizes in ((8, 1, 20), (8, 201, 20), (900, 1, 1020))
    )
    cost = GatewayCost.of(plain, answered, prompted)
    assert (cost.request_us, cost.prompt_token_us, cost.output_token_us) == pytest.approx((3000, 2, 100))
    assert cost.output_tokens_per_s == pytest.approx(10_000)


def test_the_command_writes_a_model_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster_model.json"
    command = "cluster --gpus 1 16 --mixes mixed --policies pqcache --loads 0.5 --requests-per-gpu 10"
    assert (
        main([*command.split(), "--least-requests", "100", "--json", str(path), "--plots", str(tmp_path)])
        == 0
    )
    content = json.loads(path.read_text())
    assert content["shapes"]["kind"] == "a model: simulated, not measured"
    assert set(content["shapes"]["assumed"]) == set(ClusterParameters.__dataclass_fields__)
    assert "decode_h200.json" in content["shapes"]["measured"]["pqcache"]["sources"]["step"]
    assert (tmp_path / "cluster_model.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "nothing here was measured on more than one" in shown
    assert render(path).count("| mixed |") == len(content["rows"]) == 2 * (2 * 2 + 2)
    assert shown.strip() in render(path)


def test_the_gateway_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.json"
    command = "gateway --requests 4 --concurrency 4 --output-tokens 40 --words 2000 --step-ms 1"
    assert main([*command.split(), "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["level"]["output_tokens"] for row in rows] == [1, 40, 1]
    assert rows[2]["prompt_tokens"] > 2000 > 100 > rows[0]["prompt_tokens"]
    assert all(row["cpu_s"] > 0 for row in rows)
    assert "one core streams" in capsys.readouterr().out
    assert "gateway" in render(path)

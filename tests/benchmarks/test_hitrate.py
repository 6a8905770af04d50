"""`carrel bench hitrate`: what is recorded, caches held against it, and one whole run."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.commands.hitrate import MODEL, TEXT
from benchmarks.errors import BenchmarkError
from benchmarks.hitrate import recorder as recorder_module
from benchmarks.hitrate.cached_request import CachedRequest
from benchmarks.hitrate.caches import clock_hits, lru_hits
from benchmarks.hitrate.recorded_policies import Kept, RecordedClusterKV, RecordedPQCache
from benchmarks.hitrate.recorder import Recorder, Recording
from benchmarks.hitrate.texts import Text, TextSource, cut_documents, load_tokenizer, read_text
from benchmarks.report import render
from benchmarks.traces import RecordedTrace
from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.assemble import EngineOptions, arena_layout, assemble
from gpu_worker.policies.registry import registry
from gpu_worker.records import Budget, CompleteEvent, Event, GenerationRequest, IndexDevice, SamplingParams
from kv_store.client import StoreClient
from kv_store.local import LocalStore

CPU = torch.device("cpu")
CONTEXT, STEPS, SHARE = 300, 24, 1 / 8
# K-means runs until it converges; small windows, so that one is clustered within the steps
POLICIES = {
    "pqcache": partial(RecordedPQCache, num_bits=4),
    "clusterkv": partial(RecordedClusterKV, tokens_per_cluster=20, window_size=10, window_clusters=2),
}


def numbered(name: str, count: int, first: int = 1000) -> Text:
    return Text(TextSource(name, "", count), (1, 2), tuple(range(first, first + count)))


def test_documents_are_spread_over_the_texts() -> None:
    found = cut_documents([numbered("a", 58), numbered("b", 108, 5000)], 3, 10)
    assert [len(document) for document in found] == [10, 10, 10]
    assert all(document[:2] == (1, 2) for document in found)
    # the middles of the halves of `a`, and the middle of `b`
    assert [document[2] for document in found] == [1012, 5050, 1037]
    assert found[0][2:] == tuple(range(1012, 1020))


def test_a_text_may_be_as_long_as_its_document_and_no_shorter() -> None:
    assert cut_documents([numbered("a", 8)], 1, 10) == [(1, 2, *range(1000, 1008))]
    with pytest.raises(BenchmarkError, match="a has 8 tokens, a document needs 9"):
        cut_documents([numbered("a", 8)], 1, 11)


def test_texts_are_read_plain_or_packed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL)
    (tmp_path / "plain.txt").write_text("The harbour lay still.")
    (tmp_path / "packed.txt.xz").write_bytes(lzma.compress(b"The harbour lay still."))
    plain, packed = (read_text(tmp_path / name, tokenizer) for name in ("plain.txt", "packed.txt.xz"))
    assert (plain.source.name, packed.source.name) == ("plain", "packed")
    assert plain.token_ids == packed.token_ids
    assert plain.source.sha256 == packed.source.sha256
    assert plain.prefix == (tokenizer.token_to_id("<|bos|>"),)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    for name in ("bad.txt", "plain.txt.xz", "none.txt"):
        with pytest.raises(BenchmarkError, match="is no text"):
            read_text(tmp_path / name, tokenizer)


@pytest.fixture(scope="module")
def documents() -> list[tuple[int, ...]]:
    return cut_documents([read_text(TEXT, load_tokenizer(MODEL))], 2, CONTEXT + STEPS)


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Recorder(MODEL, CPU) as made:
        yield made
    torch.set_num_threads(threads)


@pytest.fixture
def recordings(
    recorder: Recorder, documents: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Recording]:
    monkeypatch.setattr(recorder_module, "RECORDED", POLICIES)
    return {policy: recorder.record(policy, 0.2, documents, STEPS) for policy in POLICIES}


def engine_hit_rate(recorder: Recorder, policy: str, num_selected: int, document: tuple[int, ...]) -> float:
    """Of the engine itself, with a hot cache and a store behind it."""
    config = recorder.model.config
    kept = Kept(config.num_layers, config.num_kv_heads, num_selected, CPU)
    options = EngineOptions(
        max_model_len=CONTEXT + STEPS + 1,
        slot_bytes=64 << 20,
        max_num_seqs=1,
        hot_cache=HotCacheSize(share=SHARE),
        policies=registry(POLICIES[policy](kept=kept)),
        index_device=IndexDevice.GPU,
    )
    layout = arena_layout(recorder.model)
    ended: list[Event] = []
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = GenerationRequest("one", document, sampling, policy, Budget(share=0.2), CONTEXT)
    with LocalStore(64 << 20) as store:
        engine = assemble(recorder.model, StoreClient.connect(store.target, layout, worker_id="w"), options)
        engine.submit(request, ended.append)
        while engine.has_work:
            engine.step()
        engine.close()
    assert isinstance(ended[-1], CompleteEvent)
    assert ended[-1].usage.offloaded_tokens == CONTEXT + STEPS
    return ended[-1].usage.hit_rate


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulated_clock_hits_as_the_engine_does(
    policy: str, recorder: Recorder, recordings: dict[str, Recording], documents: list[tuple[int, ...]]
) -> None:
    positions, request = recordings[policy].positions, recordings[policy].request
    num_selected = request.num_selected
    assert positions.shape == (STEPS, 8, 2, 2, num_selected)
    assert (positions.diff(dim=-1) > 0).all()
    assert positions.min() >= request.num_sink
    assert all(int(step.max()) < begin for step, begin in zip(positions, request.window_begins, strict=True))
    hits = clock_hits(positions[:, :, 1:2], request, [request.num_slots(SHARE)])
    found = float(hits.mean())
    assert 0.3 < found < 1.0
    assert found == pytest.approx(engine_hit_rate(recorder, policy, num_selected, documents[1]), abs=1e-9)


def test_recorded_clusters_are_those_that_were_selected(recordings: dict[str, Recording]) -> None:
    """ClusterKV takes whole clusters, at most one of them cut: so it must be by the labels that are recorded."""
    assert recordings["pqcache"].labels is None
    recording = recordings["clusterkv"]
    labels, request = recording.labels, recording.request
    assert labels is not None
    assert labels.shape == (8, 2, 2, request.capacity)
    for step, window_begin in enumerate(request.window_begins):
        selected = torch.zeros(32, request.capacity, dtype=torch.bool)
        selected.scatter_(1, recording.positions[step].flatten(0, 2).long(), True)
        for head, (mine, of) in enumerate(zip(selected, labels.flatten(0, 2), strict=True)):
            left_out = torch.arange(request.num_sink, window_begin)[~mine[request.num_sink : window_begin]]
            cut = set(of[mine].tolist()) & set(of[left_out].tolist())
            assert len(cut) <= 1, (step, head)


def test_documents_that_were_prefilled_before_are_recorded_alike(
    recorder: Recorder, documents: list[tuple[int, ...]]
) -> None:
    recorder.forget()
    computed, copied = (recorder.record("pqcache", 0.3, documents, STEPS) for _ in range(2))
    assert torch.equal(computed.positions, copied.positions)


def test_a_budget_that_covers_the_context_is_refused(
    recorder: Recorder, documents: list[tuple[int, ...]]
) -> None:
    with pytest.raises(BenchmarkError, match="pqcache selects nothing of 300 tokens at a budget of 1"):
        recorder.record("pqcache", 1.0, documents, STEPS)


def test_what_the_model_cannot_read_is_refused(recorder: Recorder) -> None:
    with pytest.raises(BenchmarkError, match="32760 tokens and 9 more are too long: the model takes 32768"):
        recorder.record("pqcache", 0.1, [(7,) * 32769], 9)


def drawn(request: CachedRequest, num_layers: int, batch: int, heads: int) -> torch.Tensor:
    """Positions around a few favourites, so that there is something to hit."""
    generator = torch.Generator().manual_seed(3)
    steps = []
    for begin in request.window_begins:
        weights = torch.rand(num_layers, batch, heads, begin, generator=generator)
        weights[..., : request.num_sink] = -1
        weights[..., ::5] += 0.3
        steps.append(weights.topk(request.num_selected).indices.sort().values.int())
    return torch.stack(steps)


# a window that moves on, and one that is emptied now and then
WINDOWS = {"moves": range(70, 110), "empties": [80 + step - step % 8 for step in range(40)]}


def request_with(window: str) -> CachedRequest:
    num_window = 10 if window == "moves" else 7
    return CachedRequest(80, 121, 4, 4 + num_window + 1, 12, tuple(WINDOWS[window]))


def naive_lru(positions: torch.Tensor, request: CachedRequest, num_slots: int) -> list[float]:
    """One head of one sequence, token by token."""
    first = request.context - (num_slots - 1 - request.num_sink)
    held = [*range(request.num_sink), *range(max(request.num_sink, first), request.context)]
    used = {token: (-1, token) for token in held}
    rates = []
    for step, begin in enumerate(request.window_begins):
        newest, wanted = request.context + step, set(positions[step].tolist())

        def take_in(token: int, begin: int = begin, needed: frozenset[int] = frozenset(wanted)) -> None:
            if len(used) == num_slots:
                free = [one for one in used if request.num_sink <= one < begin and one not in needed]
                del used[min(free, key=used.__getitem__)]
            used[token] = (0, 0)

        # the new token comes before anything is selected, and may push out what is selected then
        take_in(newest, needed=frozenset())
        for token in range(begin, newest + 1):
            used[token] = (step, token)
        missed = sorted(wanted - used.keys())
        rates.append(1 - len(missed) / len(wanted))
        for token in missed:
            take_in(token)
        for token in wanted:
            used[token] = (step, token)
    return rates


@pytest.mark.parametrize("window", WINDOWS)
def test_lru_is_that_of_a_plain_one(window: str) -> None:
    request = request_with(window)
    positions = drawn(request, 2, 1, 2)
    sizes = [request.num_slots(share) for share in (1 / 32, 1 / 3, 2 / 3, 1.0)]
    assert sizes[0] == request.num_fixed + request.num_selected
    found = lru_hits(positions, request, sizes)
    for size, num_slots in enumerate(sizes):
        heads = [naive_lru(head, request, num_slots) for head in positions.flatten(1, 3).unbind(1)]
        mean = torch.tensor(heads, dtype=torch.float64).mean(dim=0)
        assert torch.allclose(found[size], mean), num_slots
    assert 0.2 < found[0].mean() < found[1].mean() < 1.0


@pytest.mark.parametrize("window", WINDOWS)
def test_sizes_do_not_disturb_each_other(window: str) -> None:
    request = request_with(window)
    positions = drawn(request, 2, 2, 2)
    sizes = [40, 60, request.capacity]
    together = clock_hits(positions, request, sizes)
    for size, num_slots in enumerate(sizes):
        assert torch.equal(together[size], clock_hits(positions, request, [num_slots])[0])
    assert (together[-1] == 1).all()
    assert (lru_hits(positions, request, sizes)[-1] == 1).all()


def test_a_run_writes_table_json_plots_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "hitrate.json", tmp_path / "deep" / "trace.npz"
    sizes = ["--contexts", "256", "--steps", "4", "--policies", "pqcache", "--budgets", "0.2"]
    argv = ["hitrate", "--device", "cpu", *sizes, "--caches", "1/8", "0.25", "1"]
    outputs = ["--json", str(path), "--plots", str(tmp_path / "plots"), "--trace", str(trace)]
    assert main([*argv, *outputs]) == 0
    table = capsys.readouterr().out
    assert "| 256 | pqcache | 0.2 | 20 |" in table
    assert "| 1/4 | 64 |" in table
    content = json.loads(path.read_text())
    assert content["shapes"]["carrel-nano"]["num_layers"] == 8
    assert content["shapes"]["texts"][0]["name"] == "voyage-of-the-beagle"
    assert [row["cache_share"] for row in content["rows"]] == [0.125, 0.25, 1.0]
    assert content["rows"][-1]["clock"] == content["rows"][-1]["lru"] == 1.0
    assert table.strip() in render(path)
    (picture,) = (tmp_path / "plots").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")
    recorded = RecordedTrace.load(trace, CPU)
    assert (recorded.num_selected, recorded.context) == (20, 256)
    assert round(recorded.hit_rate, 4) == content["rows"][0]["overlap"]


def test_a_run_with_the_papers_own_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hitrate.json"
    sizes = ["--contexts", "512", "--documents", "1", "--steps", "4", "--budgets", "0.2", "--caches", "1/2"]
    own = ["--paper-caches", "clusters", "lfu", "lru", "--block-cache", "256", "--k-cache", "1", "2"]
    argv = ["hitrate", "--device", "cpu", *sizes, *own, "--cluster-depths", "1", "3", "--json", str(path)]
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert "| clusters, R = 3 |" in table
    assert "| LFU of 2 blocks, k_cache = 1 |" in table
    rows = [row for row in json.loads(path.read_text())["rows"] if "cache" in row]
    names = [(row["case"]["policy"], row["cache"]["name"], row["cache"]["setting"]) for row in rows]
    blocks = [("lfu", 1), ("lfu", 2), ("lru", 1), ("lru", 2)]
    # clusters are ClusterKV's only
    assert names == [
        *(("pqcache", *cache) for cache in blocks),
        *(("clusterkv", *cache) for cache in [("clusters", 1), ("clusters", 3), *blocks]),
    ]
    assert [row["clusters"] is not None for row in rows] == [name[1] == "clusters" for name in names]
    assert all(0 < row["held_tokens"] <= 256 for row in rows if row["clusters"] is None)
    assert 0 < rows[4]["tokens"] < rows[4]["tokens_settled"] < 1
    assert table.strip() in render(path)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--trace", "x.npz"], "--trace takes one context, policy and budget"),
        (
            ["--paper-caches", "clusters", "--policies", "pqcache"],
            "--paper-caches clusters holds what clusterkv",
        ),
        (["--model", "nowhere"], "no tokenizer in nowhere/tokenizer.json"),
        (["--contexts", "16K"], "voyage-of-the-beagle has 15750 tokens, a document needs 16511"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hitrate", "--device", "cpu", *argv]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1

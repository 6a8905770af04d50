"""Short prompts in one pass over all layers: as layer by layer, each for itself, and captured where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_rig import NUM_LAYERS, Rig, make_model, random_prompt, request, tokens_alone
from offload_rig import make_sequence
from test_layered import NoCache, SlowMark, SlowOffloader
from torch import Tensor

from gpu_worker.caches.dense import DenseCache
from gpu_worker.device import Mark
from gpu_worker.errors import CapacityError
from gpu_worker.models import Decoder
from gpu_worker.records import CompleteEvent, FinishReason, GenerationRequest
from gpu_worker.runner.prompts.captured import (
    BUCKETS,
    MAX_PROMPTS,
    ShortBatch,
    ShortPass,
    ShortPrefill,
    buckets_within,
)
from gpu_worker.runner.prompts.in_progress import AnyPass, PrefillChoice
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.runner.steps.graphs import Captured
from gpu_worker.state.sequence import Sequence

CHUNK, MAX_TOKENS = 300, 256
# Of one size of pass: it is run as it is, captured, and replayed twice.
PACKS = [(50,), (30, 3, 21), (7,) * MAX_PROMPTS, (64,)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def decoder(request: pytest.FixtureRequest, poisoned_memory: None) -> Decoder:
    if (request.param == "cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    decoder = make_model().decoder
    return decoder if request.param == "cpu" else decoder.to("cuda", torch.bfloat16)


def pass_of(decoder: Decoder) -> ShortPass:
    return ShortPass(decoder, CHUNK, captures=decoder.device.type == "cuda")


class Computed:
    """Prompts of these lengths, and what became of their rows."""

    def __init__(
        self, decoder: Decoder, lengths: tuple[int, ...], short_pass: ShortPass | None = None
    ) -> None:
        self.offloader = SlowOffloader()
        self.sequences = [make_sequence(f"{seat}", seat, length) for seat, length in enumerate(lengths)]
        for sequence in self.sequences:
            sequence.offloads = True
        self.caches = [NoCache() for _ in lengths]
        make = Prefill if short_pass is None else PrefillChoice(short_pass)
        layers = [cache.layers() for cache in self.caches]
        self.prefill = make(self.sequences, decoder, layers, self.offloader, CHUNK, MAX_TOKENS)

    def logits(self) -> Tensor:
        while not self.prefill.is_done:
            assert self.prefill.advance() == []
        taken = self.prefill.take_logits()
        assert taken is not None
        return taken[1]


def check_close(found: Tensor, expected: Tensor) -> None:
    if expected.dtype == torch.float32 and not expected.is_cuda:
        torch.testing.assert_close(found, expected)
        return
    # Sums of bfloat16 are in another order: a few products differ by more than most.
    assert found.shape == expected.shape
    assert (found - expected).float().abs().mean() < 0.03 * expected.float().abs().mean()


@torch.inference_mode()
def test_rows_and_logits_are_those_of_layer_by_layer(decoder: Decoder) -> None:
    short_pass = pass_of(decoder)
    for lengths in PACKS:
        together = Computed(decoder, lengths, short_pass)
        assert isinstance(together.prefill, ShortPrefill)
        logits = together.logits()
        assert short_pass.is_open
        # In the arena are the same rows as in the caches, by sequence and layer.
        stored = [rows for cache in together.caches for rows in cache.stored]
        assert all(map(torch.equal, together.offloader.rows, stored))
        for place, length in enumerate(lengths):
            alone = Computed(decoder, (length,))
            check_close(logits[place : place + 1], alone.logits())
            for rows, expected in zip(together.caches[place].stored, alone.caches[0].stored, strict=True):
                check_close(rows, expected)


@torch.inference_mode()
def test_rows_are_overwritten_only_after_their_copies_and_logits_stay() -> None:
    decoder = make_model().decoder
    short_pass = pass_of(decoder)
    first, second = (Computed(decoder, (length,), short_pass) for length in (50, 40))
    first.prefill.advance()
    [copied] = first.offloader.marks
    assert copied.num_held == 0
    second.prefill.advance()
    assert copied.num_held == 1
    assert not first.prefill.is_done
    expected = Computed(decoder, (50,)).logits()
    torch.testing.assert_close(first.logits(), expected)
    assert first.sequences[0].num_tokens == 50
    assert first.offloader.sealed == list(range(NUM_LAYERS))


@torch.inference_mode()
def test_one_that_is_cancelled_is_waited_for_and_the_others_are_done_by_themselves() -> None:
    decoder = make_model().decoder
    computed = Computed(decoder, (9, 12, 5), pass_of(decoder))
    prefill, sequences = computed.prefill, computed.sequences
    prefill.cancel(sequences[0])
    prefill.advance()
    # Of the first one nothing was computed.
    assert [len(cache.stored) for cache in computed.caches] == [0, NUM_LAYERS, NUM_LAYERS]
    assert prefill.count_computed() == 17
    _, last = computed.offloader.marks
    prefill.cancel(sequences[1])
    last.reached = True
    prefill.advance()
    assert computed.offloader.marks[0].reached
    assert [prompt.sequence for prompt in prefill.done] == [sequences[2]]
    torch.testing.assert_close(computed.logits(), Computed(decoder, (5,)).logits())
    assert [sequence.num_tokens for sequence in sequences] == [0, 0, 5]


@torch.inference_mode()
def test_what_is_too_much_for_a_pass_is_computed_by_the_next_one() -> None:
    decoder = make_model().decoder
    computed = Computed(decoder, (200, 90, 250), pass_of(decoder))
    prefill, offloader = computed.prefill, computed.offloader
    prefill.advance()
    assert [len(cache.stored) for cache in computed.caches] == [NUM_LAYERS, NUM_LAYERS, 0]
    # Nobody waits for the copies of the first two.
    prefill.advance()
    assert [len(cache.stored) for cache in computed.caches] == [NUM_LAYERS] * 3
    assert prefill.is_copying
    assert not any(mark.reached for mark in offloader.marks)
    logits = computed.logits()
    alone = [Computed(decoder, (length,)).logits() for length in (200, 90, 250)]
    torch.testing.assert_close(logits, torch.cat(alone))


def short_rig(**options: object) -> Rig:
    model = make_model()
    choice = PrefillChoice(ShortPass(model.decoder, CHUNK, captures=False))
    return Rig(model, make_prefill=choice, prefill_chunk=CHUNK, max_joining=CHUNK, **options)


def whole() -> list[GenerationRequest]:
    """Attended whole by their policies; they fit a pass."""
    return [
        request("a", "full", prompt=random_prompt(33, 1)),
        request("b", "pqcache", 100, prompt=random_prompt(80, 2)),
        request("c", "snapkv", 1.0, prompt=random_prompt(61, 3)),
        request("d", "clusterkv", 1.0, prompt=random_prompt(1, 4)),
        request("e", "h2o", 100, prompt=random_prompt(50, 5), num_prefill=41),
        request("f", "pqcache", 64, prompt=random_prompt(20, 6), measure=True),
    ]


def made_by(rig: Rig) -> list[list[type]]:
    """Record the classes that compute the prompts that begin together from now on."""
    made: list[list[type]] = []
    prefills = rig.runner.prefills
    begin = prefills.begin

    def noted(sequences: list[Sequence]) -> AnyPass:
        begun = begin(sequences)
        made.append([type(begun) for _ in sequences])
        return begun

    prefills.begin = noted  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("trains_indexes", [False, True])
def test_requests_answer_as_if_each_were_computed_layer_by_layer(
    trains_indexes: bool, poisoned_memory: None
) -> None:
    options = {"trains_indexes": trains_indexes}
    expected = [Rig(**options).tokens(one) for one in whole()]
    rig = short_rig(**options)
    made = made_by(rig)
    rig.submit(*whole())
    rig.drain()
    assert made == [[ShortPrefill] * len(whole())]
    assert [record.tokens for record in rig.records.values()] == expected
    rig.check_empty()


def test_nobody_waits_for_rows_on_their_way_while_a_stream_goes_on() -> None:
    rig = short_rig()
    rig.submit(request("a", "full", prompt=random_prompt(33, 1), max_tokens=8))
    while not rig.records["a"].tokens:
        rig.engine.step()
    rig.engine.step()
    store_layers, waited = rig.runner.offloader.store_layers, list[int]()

    class Late(SlowMark):
        def wait(self) -> None:
            waited.append(len(rig.records["a"].tokens))
            super().wait()

    def store_late(sequence: Sequence, layers: range, rows: Tensor) -> Mark:
        store_layers(sequence, layers, rows)
        return Late()

    rig.runner.offloader.store_layers = store_late  # type: ignore[method-assign]
    rig.submit(request("b", "pqcache", 100, prompt=random_prompt(80, 2)))
    before = len(rig.records["a"].tokens)
    for _ in range(2):
        rig.engine.step()
    assert len(rig.records["a"].tokens) == before + 2
    assert waited == rig.records["b"].tokens == []
    rig.drain()
    # Once a's eight tokens are there nothing else is to be done.
    assert set(waited) == {8}
    assert rig.records["b"].tokens
    rig.check_empty()


def test_who_selects_or_has_a_known_prefix_is_computed_layer_by_layer() -> None:
    prefix = random_prompt(128, 40)
    first, later = (
        request(name, "full", prompt=prefix + random_prompt(9, seed))
        for seed, name in enumerate(("first", "later"))
    )
    selecting = request("selecting", "pqcache", 0.25, prompt=90)
    expected = [tokens_alone(one) for one in (first, later, selecting)]
    rig = short_rig(reuses_prefixes=True)
    made = made_by(rig)
    assert [rig.tokens(one) for one in (first, later, selecting)] == expected
    assert made == [[ShortPrefill], [Prefill], [Prefill]]
    # What the short pass had put into the arena was read again.
    assert rig.records["later"].usage.cached_tokens == 128
    rig.check_empty()


@pytest.mark.parametrize("is_early", [True, False])
def test_one_that_is_aborted_leaves_the_others_alone(is_early: bool) -> None:
    expected = {one.request_id: tokens_alone(one) for one in whole()}
    rig = short_rig()
    rig.submit(*whole())
    if not is_early:
        rig.step()
    rig.engine.abort("b")
    rig.drain()
    last = rig.records["b"].last
    assert isinstance(last, CompleteEvent)
    assert last.finish_reason is FinishReason.ABORT
    for name in "acdef":
        assert rig.records[name].tokens == expected[name]
    rig.check_empty()


def test_one_that_does_not_fit_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {one.request_id: tokens_alone(one) for one in whole()}
    store: Callable[..., None] = DenseCache.store_layers

    def failing(cache: DenseCache, sequence: Sequence, rows: Tensor) -> None:
        if sequence.sequence_id == "b":
            raise torch.OutOfMemoryError("CUDA out of memory")
        store(cache, sequence, rows)

    monkeypatch.setattr(DenseCache, "store_layers", failing)
    rig = short_rig()
    rig.submit(*whole())
    rig.drain()
    assert isinstance(rig.records["b"].error, CapacityError)
    for name in "acdef":
        assert rig.records[name].tokens == expected[name]
    rig.check_empty()


def test_a_pass_that_does_not_fit_ends_who_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = short_rig()
    with monkeypatch.context() as patch:

        def failing(*args: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(rig.model.decoder, "logits", failing)
        rig.submit(*whole())
        rig.step()
    assert all(isinstance(rig.records[one.request_id].error, CapacityError) for one in whole())
    rig.check_empty()
    assert rig.tokens(request("next")) == tokens_alone(request("next"))


@pytest.mark.gpu
@torch.inference_mode()
def test_what_cannot_be_captured_is_computed_and_the_next_ones_go_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    decoder = make_model().decoder.to("cuda", torch.bfloat16)
    short_pass = pass_of(decoder)

    def refused(*arguments: object) -> None:
        raise RuntimeError("no capture")

    monkeypatch.setattr(Captured, "of", refused)
    expected = Computed(decoder, (50,)).logits()
    for _ in range(2):
        computed = Computed(decoder, (50,), short_pass)
        assert isinstance(computed.prefill, ShortPrefill)
        check_close(computed.logits(), expected)
    assert isinstance(Computed(decoder, (50,), short_pass).prefill, Prefill)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("num_tokens", "largest"), [(1, 64), (64, 64), (65, 128), (700, 768), (1024, 1024), (9000, 1024)]
)
def test_a_pass_has_the_least_size_that_its_prompts_fit(num_tokens: int, largest: int) -> None:
    assert buckets_within(num_tokens)[-1] == largest
    if num_tokens <= BUCKETS[-1]:
        assert ShortBatch.of([range(num_tokens)]).num_tokens == largest

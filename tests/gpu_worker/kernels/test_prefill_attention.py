"""Chunked causal attention in all its forms against the definition, and that against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.engine.prompt_room import buffer_sizes, buffer_tokens
from gpu_worker.kernels.prefill_attention import Packed, attend_chunk_naive, kernel, reference
from gpu_worker.kernels.prefill_attention.reference import attend_in_pieces

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def problem(
    num_tokens: int,
    begin: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_kv_heads: int = 2,
) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(num_tokens + begin)
    # As the decoder gives them: a token's heads lie together, keys and values between two tokens' queries.
    wide = 2 * torch.randn(num_tokens, num_kv_heads * (group + 2), head_dim, generator=generator)
    # Rows beyond the chunk are not written yet: they hold anything.
    rows = torch.full((num_kv_heads, begin + num_tokens + 5, 2 * head_dim), float("nan"))
    rows[:, : begin + num_tokens] = torch.randn(
        num_kv_heads, begin + num_tokens, 2 * head_dim, generator=generator
    )
    query = wide.to(device, dtype)[:, : num_kv_heads * group]
    return query, rows.to(device, dtype), head_dim**-0.5


def check(output: Tensor, query: Tensor, rows: Tensor, begin: int, scale: float) -> None:
    expected = attend_chunk_naive(query.float(), rows.float(), begin, scale)
    tolerance = TOLERANCE[query.dtype]
    assert output.dtype == query.dtype
    assert output.shape == query.shape
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


def causal_loop(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // rows.shape[0]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for token in range(num_tokens):
        for head in range(num_heads):
            past = rows[head // group, : begin + token + 1].double()
            weights = (past[:, :head_dim] @ query[token, head].double() * scale).softmax(0)
            output[token, head] = weights @ past[:, head_dim:]
    return output


@pytest.mark.parametrize(("num_tokens", "begin"), [(1, 0), (1, 129), (63, 0), (20, 129)])
def test_every_token_attends_itself_and_what_came_before(num_tokens: int, begin: int) -> None:
    query, rows, scale = problem(num_tokens, begin, 3, 16, torch.float32, torch.device("cpu"))
    expected = causal_loop(query, rows, begin, scale)
    output = attend_chunk_naive(query, rows, begin, scale).double()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 96), (16, 128)])
@pytest.mark.parametrize(("num_tokens", "begin"), [(1, 0), (1, 129), (63, 1), (130, 257)])
def test_every_form_is_the_definition(
    num_tokens: int, begin: int, group: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    query, rows, scale = problem(num_tokens, begin, group, head_dim, dtype, device)
    # What runs on a CPU calls an operation that a GPU does not have.
    forms = (kernel, reference) if device.type == "cpu" else (kernel,)
    with torch.inference_mode():
        for form in forms:
            check(form.attend_chunk(query, rows, begin, scale), query, rows, begin, scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 100), (4, 128)])
@pytest.mark.parametrize(
    ("num_queries", "begins"),
    [([17, 1, 130, 64], [0, 0, 0, 0]), ([5, 40], [129, 0]), ([1, 20, 1], [0, 300, 64]), ([1, 1], [7, 0])],
)
def test_packed_prompts_attend_as_each_alone(
    num_queries: list[int],
    begins: list[int],
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_tokens, num_rows = sum(num_queries), [sum(span) for span in zip(num_queries, begins, strict=True)]
    query, rows, scale = problem(num_tokens, sum(begins), group, head_dim, dtype, device)
    packed = Packed.of(num_queries, num_rows, device)
    for form in (kernel, reference) if device.type == "cpu" else (kernel,):
        with torch.inference_mode():
            output = form.attend_prompts(query, rows, packed, scale)
        own_rows = rows[:, : sum(num_rows)].split(num_rows, dim=1)
        of_prompts = zip(output.split(num_queries), query.split(num_queries), own_rows, begins, strict=True)
        for own_output, own_query, own, begin in of_prompts:
            check(own_output, own_query, own, begin, scale)


def joined(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output of PyTorch's fused attention, and the logarithm of its softmax sums."""
    group = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(group, dim=1).transpose(2, 3) * scale
    if is_causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(scores.shape[3] - scores.shape[2] + 1)
        scores = scores.masked_fill(future, float("-inf"))
    output = scores.softmax(dim=-1) @ values.repeat_interleave(group, dim=1)
    return output, scores.logsumexp(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("num_tokens", "begin", "shapes"),
    [
        (16, 0, [(16, 16, True)]),
        (16, 8, [(16, 16, True), (16, 8, False)]),
        # 7 units: 4, 2 and 1.
        (16, 56, [(16, 16, True), (16, 32, False), (16, 16, False), (16, 8, False)]),
        # Behind a prefix that ends anywhere what is left of the past goes with the chunk.
        (8, 43, ["flash", (8, 32, False), (8, 8, False)]),
        (8, 5, ["flash"]),
        # A prompt's end.
        (13, 48, [(8, 8, True), (8, 32, False), (8, 16, False), "flash"]),
        (23, 0, [(16, 16, True), "flash"]),
        (7, 48, ["flash"]),
        (24, 16, [(16, 16, True), (16, 16, False), (8, 8, True), (8, 32, False)]),
        # Few queries behind much: pieces of the past at once.
        (7, 149, [(4, 36), "flash"]),
        (1, 400, [(13, 28), "flash"]),
        (13, 400, [(8, 8, True), (8, 256, False), (8, 128, False), (8, 16, False), (13, 28), "flash"]),
    ],
)
def test_whole_chunks_need_few_shapes(
    num_tokens: int, begin: int, shapes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN plans every shape that it has not seen, so that none may depend on a prompt's length."""
    asked: list[object] = []

    def cudnn(
        query: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        asked.append((query.shape[2], keys.shape[2], is_causal))
        return joined(query, keys, values, scale, is_causal)

    def flash(
        query: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool = True
    ) -> tuple[Tensor, Tensor]:
        asked.append("flash" if is_causal else (keys.shape[0], keys.shape[2]))
        return joined(query, keys, values, scale, is_causal)

    monkeypatch.setattr(kernel, "UNIT", 8)
    for name, value in (("FLASH_QUERIES", 4), ("PROGRAMS", 20 * 6), ("LEAST_PIECE", 30)):
        monkeypatch.setattr(kernel, name, value)
    monkeypatch.setattr(kernel, "_cudnn", cudnn)
    monkeypatch.setattr(kernel, "_flash", flash)
    for name in ("can_use_cudnn_attention", "can_use_flash_attention"):
        monkeypatch.setattr(kernel, name, lambda _: True)
    query, rows, scale = problem(num_tokens, begin, 3, 16, torch.float32, torch.device("cpu"))
    check(kernel.attend_chunk(query, rows, begin, scale), query, rows, begin, scale)
    assert asked == shapes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 96), (2, 100), (4, 128), (16, 128)])
@pytest.mark.parametrize(
    ("num_tokens", "begin"),
    [
        (1024, 0),
        (2048, 1024),
        (1024, 7168),
        (1024, 5000),
        (1000, 2048),
        (2048, 100),
        (3071, 0),
        (2047, 3072),
        # Of few queries the past is in pieces.
        (264, 32000),
        (1, 5000),
        (8, 20001),
        (1032, 8192),
    ],
)
def test_a_whole_chunk_on_a_gpu(
    num_tokens: int, begin: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    query, rows, scale = problem(num_tokens, begin, group, head_dim, dtype, torch.device("cuda"))
    with torch.inference_mode():
        check(kernel.attend_chunk(query, rows, begin, scale), query, rows, begin, scale)


@pytest.mark.parametrize("max_scores", [1, 6 * 90, 6 * 90 * 7, 1 << 20])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_pieces_of_any_size_are_one_attention(
    max_scores: int, dtype: torch.dtype, device: torch.device
) -> None:
    query, rows, scale = problem(40, 50, 3, 16, dtype, device)
    check(attend_in_pieces(query, rows, 50, scale, max_scores), query, rows, 50, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_needs_no_mask_and_no_scores_of_its_own_size(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    num_tokens, begin = 1024, 64 << 10
    rows = torch.randn(2, begin + num_tokens, 256, device=device, dtype=dtype)
    query = torch.randn(num_tokens, 16, 128, device=device, dtype=dtype)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = kernel.attend_chunk(query, rows, begin, 128**-0.5)
    grown = torch.cuda.max_memory_allocated() - held
    # All scores in float32 are 4 GiB. Flash attention is to need nothing of the past's length.
    assert grown < (2 << 30 if dtype == torch.float32 else 256 << 20)
    last = attend_chunk_naive(query[-3:], rows, begin + num_tokens - 3, 128**-0.5)
    torch.testing.assert_close(output[-3:], last, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


class Asked(TorchDispatchMode):
    """Notes the shapes and strides that cuDNN is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "cudnn_attention" in func.name():
            tensors = [(*each.shape, *each.stride()) for each in args[:3]]
            # A default at the end is left out.
            self.shapes.add((*tensors, len(args) > 6 and args[6]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [2048, 3072, 700])
def test_no_prompt_gives_cudnn_what_is_not_planned(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "can_use_flash_attention", lambda asked: True)
    monkeypatch.setattr(kernel, "can_use_cudnn_attention", lambda asked: True)
    longest, meta = 20000, torch.device("meta")
    query = torch.empty(chunk, 4, 64, dtype=torch.bfloat16, device=meta)
    for num_rows in buffer_sizes(longest):
        rows = torch.empty(2, num_rows, 128, dtype=torch.bfloat16, device=meta)
        with Asked() as planned:
            assert sum(1 for _ in kernel.plan_chunks(query, rows, 0.1)) == len(planned.shapes)
        fitting = [num for num in range(1, num_rows + 1, 1999) if buffer_tokens(num, longest) == num_rows]
        for num_tokens in {*fitting, num_rows}:
            # A known prefix may end anywhere.
            for first in {0, 512} if num_tokens > 512 else {0}:
                with Asked() as asked:
                    for begin in range(first, num_tokens, chunk):
                        kernel.attend_chunk(query[: num_tokens - begin], rows, begin, 0.1)
                assert asked.shapes <= planned.shapes
        assert chunk < kernel.UNIT or num_rows < kernel.UNIT or planned.shapes

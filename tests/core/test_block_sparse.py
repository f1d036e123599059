"""Block-sparse attention: every backend against explicit softmax over the selected keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

from flashdreams.core.attention import BLOCK_SPARSE_BACKENDS, block_sparse_attention, block_sparse_self_test
from flashdreams.core.attention import block_sparse_backends as backends
from flashdreams.core.attention.block_sparse_choice import Use, lacks


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    blocks: tuple[int, int]

    def attend(self, backend: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        q, k, v = (x.to(device, dtype) for x in (self.q, self.k, self.v))
        mask, (block_q, block_k) = self.mask.to(device), self.blocks
        return block_sparse_attention(q, k, v, mask, block_q=block_q, block_k=block_k, backend=backend)

    def has_empty_rows(self) -> bool:
        return not self.mask.any(-1).all()

    def is_ragged(self) -> bool:
        return self.q.shape[1] % self.blocks[0] > 0 or self.k.shape[1] % self.blocks[1] > 0


def case(
    seed: int, batch: int, heads: int, dim: int, blocks: tuple[int, int], length: int, keys: int, per_head: bool = True
) -> Case:
    """Float64 tensors, laid out as a projection to several heads leaves them, and a mask with some rows empty."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, heads * dim) for tokens in (length, keys, keys)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).unflatten(2, (heads, dim)) for s in shapes)
    rows, columns = math.ceil(length / blocks[0]), math.ceil(keys / blocks[1])
    shape = (batch, heads, rows, columns) if per_head else (1, 1, rows, columns)
    density = torch.rand((), generator=generator)
    return Case(q, k, v, torch.rand(shape, generator=generator) < density, blocks)


def random_cases(count: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def one_of(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    for seed in range(count):
        blocks = one_of(1, 8, 16, 128), one_of(1, 8, 32, 128)
        sizes = [one_of(1, block, 2 * block, 3 * block + one_of(-1, 1, 7)) for block in blocks]
        yield case(seed, one_of(1, 2), one_of(1, 3), one_of(4, 32), blocks, *sizes, per_head=one_of(0, 1) > 0)


def explicit(each: Case) -> Tensor:
    """One query and one head at a time, over exactly the keys its block selects."""
    out = torch.zeros_like(each.q)
    for b, i, h in product(*map(range, each.q.shape[:3])):
        row = each.mask.expand(each.q.shape[0], each.q.shape[2], -1, -1)[b, h, i // each.blocks[0]]
        chosen = [j for j in range(each.k.shape[1]) if row[j // each.blocks[1]]]
        if chosen:
            scores = each.k[b, chosen, h] @ each.q[b, i, h] / math.sqrt(each.q.shape[3])
            out[b, i, h] = scores.softmax(0) @ each.v[b, chosen, h]
    return out


def difference(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value; where all is 0, 0 is expected."""
    return ((got.double().cpu() - want.double()).abs().max() / want.abs().max().clamp_min(1e-30)).item()


SMALL = [
    case(0, 2, 2, 8, (4, 4), 12, 20),
    case(1, 1, 3, 4, (4, 2), 10, 7),
    case(2, 2, 2, 4, (8, 16), 5, 40, per_head=False),
    case(3, 1, 1, 4, (2, 4), 9, 3),
]


@pytest.mark.ci_cpu
@pytest.mark.parametrize("each", SMALL)
@pytest.mark.parametrize("backend", ["dense", "gather", "auto"])
def test_it_is_softmax_over_the_selected_keys(each: Case, backend: str):
    torch.testing.assert_close(each.attend(backend, torch.float64), explicit(each), rtol=1e-12, atol=1e-12)


@pytest.mark.ci_cpu
def test_queries_without_a_block_get_zero():
    each = SMALL[0]
    each.mask[0, 1, 2] = False
    for backend in ("dense", "gather", "flex_eager"):
        got = each.attend(backend)
        assert (got[0, 8:12, 1] == 0).all() and got.isfinite().all() and (got[0, 8:12, 0] != 0).any()


@pytest.mark.ci_cpu
def test_nothing_of_an_unselected_block_is_looked_at():
    each = case(4, 1, 1, 8, (4, 4), 8, 12)
    each.mask[...] = torch.tensor([True, False, True])
    want = each.attend("gather")
    each.k[:, 4:8], each.v[:, 4:8] = 1e4, -1e4
    torch.testing.assert_close(each.attend("gather"), want, rtol=0, atol=0)


@pytest.mark.ci_cpu
def test_the_scale_can_be_given():
    each = SMALL[1]
    block_q, block_k = each.blocks
    for backend in ("dense", "gather", "flex_eager"):
        got = block_sparse_attention(
            *(each.q, each.k, each.v, each.mask), block_q=block_q, block_k=block_k, scale=0.25, backend=backend
        )
        double = Case(each.q * 0.25 * math.sqrt(each.q.shape[3]), each.k, each.v, each.mask, each.blocks)
        torch.testing.assert_close(got, explicit(double), rtol=1e-12, atol=1e-12)


@pytest.mark.ci_cpu
def test_backends_agree_in_float32_on_200_random_masks_and_shapes(monkeypatch: pytest.MonkeyPatch):
    """Eager FlexAttention compiles its wrapper anew for every shape, half a minute in all, but for this switch."""
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    cases = list(random_cases(200))
    for number, each in enumerate(cases):
        want = each.attend("dense")
        for backend in ("flex_eager", "gather"):
            assert difference(each.attend(backend), want) <= 1e-5, (number, backend)
    assert sum(each.has_empty_rows() for each in cases) > 50 and sum(each.is_ragged() for each in cases) > 50


@pytest.mark.ci_cpu
@pytest.mark.parametrize("each", [SMALL[0], SMALL[2]])
def test_flex_attention_agrees_without_that_switch(each: Case):
    assert difference(each.attend("flex_eager"), each.attend("dense")) <= 1e-5


@pytest.mark.ci_cpu
@pytest.mark.parametrize("each", [case(5, 2, 2, 8, (16, 32), 40, 200), case(6, 2, 2, 8, (16, 8), 33, 100, False)])
def test_the_compiled_kernel_is_given_exactly_the_selected_blocks(each: Case, monkeypatch: pytest.MonkeyPatch):
    """And all of them as whole blocks: it is not left to evaluate a mask token by token."""
    given = []

    def record(q: Tensor, k: Tensor, v: Tensor, *, block_mask: flex_module.BlockMask, scale: float) -> Tensor:
        given.append(block_mask)
        return q

    monkeypatch.setattr(backends, "_compiled_flex", lambda: record)
    backends.flex(each.q, each.k, each.v, each.mask, each.blocks, 1.0)
    (block_mask,) = given
    assert (block_mask.to_dense().bool() == each.mask).all() and (block_mask.kv_num_blocks == 0).all()
    assert (block_mask.full_kv_num_blocks == each.mask.sum(-1)).all()
    assert block_mask.BLOCK_SIZE == each.blocks and block_mask.seq_lengths == (each.q.shape[1], each.k.shape[1])


@pytest.mark.ci_cpu
def test_compiled_flex_attention_agrees_on_12_masks():
    """Lengths change all the time, yet only two kernels are made, 10 s each: for the first lengths, and for any."""
    if needed := lacks("flex", Use()):
        pytest.skip(f"compiled FlexAttention needs {needed}")
    torch.compiler.reset()
    lengths = [(300, 450), (222, 168), (248, 500), (512, 384), (201, 288), (225, 1000)] * 2
    cases = [case(seed, 2, 3, 32, (128, 64), *pair) for seed, pair in enumerate(lengths)]
    for number, each in enumerate(cases):
        assert difference(each.attend("flex"), each.attend("dense")) <= 1e-5, number
    assert sum(each.has_empty_rows() for each in cases) >= 4


@pytest.mark.ci_cpu
@pytest.mark.parametrize("backend", ["dense", "gather"])
@pytest.mark.parametrize("each", SMALL)
def test_gradients_are_those_of_explicit_softmax(each: Case, backend: str):
    def gradients(attend) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (each.q, each.k, each.v)]
        out = attend(Case(*inputs, each.mask, each.blocks))
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]

    got = gradients(lambda c: c.attend(backend, torch.float64))
    for mine, want in zip(got, gradients(explicit), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-9)


@pytest.mark.ci_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["dense", "gather"])
def test_self_test_passes_and_reports_the_error(backend: str, dtype: torch.dtype):
    assert 0 < block_sparse_self_test(backend, "cpu", dtype) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.ci_cpu
@pytest.mark.parametrize(
    "broken",
    [
        lambda q, k, v, mask, blocks, scale: backends.dense(q, k, v, mask, blocks, scale * 1.001),
        lambda q, k, v, mask, blocks, scale: backends.dense(q, k, v, mask.roll(1, -1), blocks, scale),
        lambda q, k, v, mask, blocks, scale: backends.dense(q, k, v, mask, blocks, scale) * math.nan,
        lambda q, k, v, mask, blocks, scale: backends.dense(q, k, v, mask[:, :1], blocks, scale),
    ],
    ids=["scale slightly off", "other blocks", "not a number", "every head the first one's mask"],
)
def test_a_backend_with_wrong_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, broken):
    monkeypatch.setitem(BLOCK_SPARSE_BACKENDS, "broken", broken)
    with pytest.raises(RuntimeError, match="block-sparse backend 'broken' is wrong on cpu in torch.float32: error"):
        block_sparse_self_test("broken")


@pytest.mark.ci_gpu
@pytest.mark.parametrize("backend", ["block_sparse_attn", "flex", "gather", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_backends_equal_the_reference(backend: str, dtype: torch.dtype):
    if backend != "auto" and (needed := lacks(backend, Use("cuda", dtype))):
        pytest.skip(f"{backend} needs {needed}")
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for seed, (length, keys) in enumerate([(384, 512), (300, 450), (128, 77)]):
        each = case(seed, 2, 3, 128, (128, 128), length, keys)
        want = each.attend("dense", torch.float64)
        assert difference(each.attend(backend, dtype, "cuda"), want) <= tolerance, (length, keys)

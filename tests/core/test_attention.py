"""One attention function; every backend is checked against explicit softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashdreams.core.attention import BACKENDS, attention, check_backend, self_test

pytestmark = pytest.mark.ci_cpu

CPU_BACKENDS = ["sdpa", "reference"]


def explicit(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    """One query and one head at a time."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        scores = (k[b, :, h] @ q[b, i, h]) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if allowed is not None:
            scores[~allowed[i]] = -math.inf
        out[b, i, h] = scores.softmax(0) @ v[b, :, h]
    return out


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, 3, 8, generator=generator) for length in (5, 7, 7))
    return q, k, v


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_backends_equal_explicit_softmax(qkv: tuple[Tensor, Tensor, Tensor], backend: str):
    got = attention(*qkv, backend=backend)
    torch.testing.assert_close(got.double(), explicit(*qkv), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_scale_can_be_given(qkv: tuple[Tensor, Tensor, Tensor], backend: str):
    got = attention(*qkv, scale=1.0, backend=backend)
    torch.testing.assert_close(got.double(), explicit(*qkv, scale=1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_mask_says_who_may_attend_or_is_added_to_the_scores(qkv: tuple[Tensor, Tensor, Tensor], backend: str):
    allowed = torch.ones(5, 7, dtype=torch.bool).tril(2)
    want = explicit(*qkv, allowed)
    added = torch.zeros(5, 7).masked_fill(~allowed, -math.inf)
    for mask in (allowed, added):
        got = attention(*qkv, mask=mask, backend=backend)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_order_of_keys_does_not_matter(qkv: tuple[Tensor, Tensor, Tensor], backend: str):
    """What lets the rolling cache stay where it is."""
    q, k, v = qkv
    order = torch.randperm(7)
    got, want = attention(q, k[:, order], v[:, order], backend=backend), attention(q, k, v, backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_self_test_passes_and_reports_the_error(backend: str, dtype: torch.dtype):
    assert 0 < self_test(backend, "cpu", dtype) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    "broken",
    [
        lambda q, k, v, mask, scale: BACKENDS["sdpa"](q, k, v, mask, scale * 1.001),
        lambda q, k, v, mask, scale: BACKENDS["sdpa"](q, k, v, mask, scale) * math.nan,
        lambda q, k, v, mask, scale: BACKENDS["sdpa"](q, k[:, :-1], v[:, :-1], mask, scale),
    ],
    ids=["scale slightly off", "not a number", "last key forgotten"],
)
def test_a_backend_with_wrong_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, broken):
    monkeypatch.setitem(BACKENDS, "broken", broken)
    with pytest.raises(RuntimeError, match="attention backend 'broken' is wrong on cpu in torch.float32: error"):
        check_backend("broken")


def test_an_unknown_backend_names_those_there_are():
    with pytest.raises(ValueError, match="no attention backend 'xformers' here; available: .*reference, sdpa"):
        check_backend("xformers")

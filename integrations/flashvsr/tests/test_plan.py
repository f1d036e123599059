"""``flashdreams plan`` knows how much the sparse attention reads, though not what."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashdreams.acceleration.counting import counting
from flashdreams.acceleration.plan import plan_model
from flashdreams.core.attention import block_sparse_attention
from flashdreams.core.controls import Control, Frame
from flashdreams.plugins.registry import get_runner
from flashvsr import _attention
from small_flashvsr import narrow

pytestmark = pytest.mark.ci_cpu


def test_what_is_said_to_be_selected_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def looked_at(q: Any, k: Any, v: Any, mask: torch.Tensor, *, selected: int, **options: Any) -> torch.Tensor:
        assert (mask.sum((2, 3)) == selected).all()
        shares.append(selected / math.prod(mask.shape[2:]))
        return block_sparse_attention(q, k, v, mask, **options)

    monkeypatch.setattr(_attention, "block_sparse_attention", looked_at)
    frames = torch.randint(256, (60, 16, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for _ in narrow().setup().rollout(control=[Control(frame=Frame(frame.numpy())) for frame in frames], num_chunk=5):
        pass
    assert len(set(shares)) > 1 and max(shares) < 1


def test_work_counts_the_selected_pairs_alone() -> None:
    q, k = torch.zeros(1, 512, 2, 16, device="meta"), torch.zeros(1, 1024, 2, 16, device="meta")
    mask = torch.zeros(1, 2, 4, 8, device="meta", dtype=torch.bool)
    with counting() as counter:
        block_sparse_attention(q, k, k, mask, selected=10)
        assert counter.flops["attention"] == 10 * 128 * 128 * 16 * 2 * 4
        counter.reset()
        assert block_sparse_attention(q, k, k, mask).shape == q.shape
        assert counter.flops["attention"] == 512 * 1024 * 16 * 2 * 4


def test_work_of_a_published_model_is_what_the_arithmetic_says() -> None:
    """At 768x1280 a row of two latent frames has 6 x 10 windows of 128 tokens, and reads 2 x 60 x 60 pairs less one."""
    plan = plan_model(get_runner("flashvsr-x4").pipeline)
    pairs, queries, text = 2 * 60**2 - 1, 60 * 128, 512
    assert plan.kinds["attention"] == pytest.approx(30 * 4 * 1536 * (pairs * 128**2 + queries * text), rel=0.001)

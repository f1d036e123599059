"""Every attention backend beside PyTorch's own, bare, with keys laid out as suits it best."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flashdreams.acceleration.bench.report import Entry
from flashdreams.acceleration.bench.sampling import Plan, interleave, waiter
from flashdreams.core.attention import BACKENDS, attention


def measure_attention(
    queries: int, keys: int, heads: int, head_dim: int, *, dtype: str, device: str, plan: Plan, seed: int = 0
) -> tuple[list[Entry], dict[str, str]]:
    """Times of each backend on ``[1, queries, heads, head_dim]`` over ``keys`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, generator=generator).to(device, getattr(torch, dtype))
        for tokens in (queries, keys, keys)
    )
    cases = {"bound": lambda: F.scaled_dot_product_attention(q, k, v)}
    facts = {}
    with torch.inference_mode():
        for name in BACKENDS:
            inputs = [x.transpose(1, 2) for x in (q, k, v)]
            try:
                attention(*inputs, backend=name)
            except (RuntimeError, ValueError) as error:
                facts[name] = f"does not run here: {str(error).splitlines()[0][:120]}"
                continue
            cases[name] = lambda name=name, inputs=inputs: attention(*inputs, backend=name)
        times = interleave(cases, plan, waiter(torch.device(device)))
    flops = 4 * queries * keys * heads * head_dim
    return [Entry(name, times[name], times["bound"], flops) for name in cases if name != "bound"], facts

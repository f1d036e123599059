"""One pass through the blocks of a transformer over a full window, beside its products and attention alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.acceleration.bench.bound import Bound, Call, CallRecorder, work
from flashdreams.acceleration.bench.report import Entry
from flashdreams.acceleration.bench.sampling import Plan, interleave, waiter
from flashdreams.acceleration.compile import Region, compile_modules
from flashdreams.infra.config import TransformerConfig
from flashdreams.infra.layout import ChunkPlan, Layout
from flashdreams.infra.transformer import Transformer

MODES = ("eager", "compiled")


def grid_of(tokens: int) -> tuple[int, int]:
    """Rows and columns of a frame of ``tokens``: the most square there is."""
    rows = next(n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
    return rows, tokens // rows


class Step:
    """What a pass hands to each block, caught once and then given again.

    Args:
        tokens: of one latent frame.
    """

    def __init__(self, config: TransformerConfig, tokens: int, device: str, seed: int = 0) -> None:
        transformer: Transformer = config.setup(device=device)
        rows, columns = grid_of(tokens)
        patch, plan = config.spatial_patch, ChunkPlan.of(config.len_t)
        layout = Layout(1, transformer.latent_channels, rows * patch, columns * patch, plan)
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
        conditions = transformer.conditions_type.from_dict({"text": draw(1, *config.text_shape)})
        timestep = torch.full((1,), 500.0, device=device)
        self.blocks: list[nn.Module] = list(transformer.blocks)
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        with torch.no_grad():
            cache, chunk = transformer.initialize_cache(layout, conditions), 0
            while plan.span(chunk)[1] < (config.window_size_t or 0):
                transformer.commit(draw(*layout.shape(chunk)), timestep, cache)
                chunk += 1
            with ExitStack() as stack:
                for block in self.blocks:
                    stack.callback(block.register_forward_pre_hook(self._catch, with_kwargs=True).remove)
                transformer.predict_flow(draw(*layout.shape(chunk)), timestep, cache)
            with CallRecorder() as recorder:
                self.run()
        self.calls: list[Call] = recorder.take()

    def _catch(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.append((args, kwargs))

    def run(self) -> Tensor:
        """All blocks, one after the other."""
        x = self._inputs[0][0][0]
        with torch.no_grad():
            for block, (args, kwargs) in zip(self.blocks, self._inputs, strict=True):
                x = block(x, *args[1:], **kwargs)
        return x


def uncompiled(regions: Sequence[Region], run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` without what was compiled."""

    def eager() -> Any:
        with ExitStack() as stack:
            for region in regions:
                stack.enter_context(region.paused())
            return run()

    return eager


def measure_step(
    config: TransformerConfig, *, tokens: int, device: str, modes: Sequence[str], plan: Plan, seed: int = 0
) -> tuple[list[Entry], dict[str, Any]]:
    """Times of the blocks of ``config``, its window full, in each of ``modes``; and facts about them."""
    step = Step(config, tokens, device, seed)
    bound = Bound().prepare(step.calls)
    regions, facts = [], {}
    cases = {"bound": bound, "eager": step.run}
    if "compiled" in modes:
        want = step.run()
        regions = compile_modules(step.blocks)
        cases["eager"], cases["compiled"] = uncompiled(regions, step.run), step.run
        facts["compiled against eager, largest difference"] = relative_difference(step.run(), want)
    cases = {name: case for name, case in cases.items() if name in ("bound", *modes)}
    times = interleave(cases, plan, waiter(torch.device(device)))
    note = "compiling failed, so that this ran uncompiled" if any(region.broken for region in regions) else ""
    entries = [
        Entry(mode, times[mode], times["bound"], work(step.calls), note if mode == "compiled" else "") for mode in modes
    ]
    return entries, facts


def relative_difference(got: Tensor, want: Tensor) -> float:
    """Largest difference, in units of the largest magnitude wanted."""
    return ((got - want).abs().max() / want.abs().max()).item()

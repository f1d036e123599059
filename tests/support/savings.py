"""What each exact saving brings: ``python tests/support/savings.py [tiny|wide] [--only NAME ...] [--repeats N]``.

For each, two rollouts of one noise take turns, chunk by chunk in a full window: one as the model is, the other made to
compute anew what is saved. Their latents are compared, and their chunks timed, from noise to context. ``tiny`` has
tiny-world's sizes (its own weights), ``wide`` those of Wan2.1-1.3B in two layers, with 180 tokens a chunk and 1,260 in
the window.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.noise import KeyedNoise
from flashdreams.infra.cache import PipelineCache
from flashdreams.infra.config import DiffusionModelConfig
from flashdreams.infra.diffusion_model import DiffusionModel
from flashdreams.infra.layout import ChunkPlan, Layout
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.transformer import WanTransformer
from lingbot.config import PIPELINE_LINGBOT_WORLD_FAST_V1
from tiny_world.config import PIPELINE_TINY_WORLD

FEW_STEPS = FewStepSchedulerConfig(num_steps=4, denoising_steps=(1000, 750, 500, 250), shift=5.0, warp=True)


@dataclass(frozen=True)
class Work:
    """A model, and the latent rows and columns it makes."""

    model: DiffusionModelConfig
    size: tuple[int, int]
    controlled: bool = False


WIDE = WanTransformerConfig(
    network=WanNetworkConfig(num_layers=2), dtype="float32", checkpoint_path="random:0", len_t=3, window_size_t=21
)
WORK = {
    "tiny": Work(PIPELINE_TINY_WORLD.diffusion_model, (8, 8)),
    "wide": Work(DiffusionModelConfig(transformer=WIDE, scheduler=FEW_STEPS), (12, 20)),
}
_WIDTHS: dict[str, dict[str, int]] = {
    "tiny": {"dim": 192, "ffn_dim": 768, "num_heads": 4, "num_layers": 6, "text_dim": 96},
    "wide": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 2, "text_dim": 4096},
}


def with_camera(shape: str) -> Work:
    """A LingBot-World model as wide and deep, which a camera moves."""
    changes = {"checkpoint_path": "random:0", "dtype": "float32", "network": _WIDTHS[shape]}
    transformer = derive_config(PIPELINE_LINGBOT_WORLD_FAST_V1.diffusion_model.transformer, changes)
    return Work(DiffusionModelConfig(transformer=transformer, scheduler=FEW_STEPS), WORK[shape].size, controlled=True)


def before_each_pass(change: Callable[[WanTransformer, Any], None]) -> Any:
    """Do this to the cache, before anything of a pass is made."""
    passes = WanTransformer._passes

    def changed(self: WanTransformer, latent: Tensor, timestep: Tensor, cache: Any, input: Any) -> Any:
        change(self, cache)
        yield from passes(self, latent, timestep, cache, input)

    return mock.patch.object(WanTransformer, "_passes", changed)


def encode_text(transformer: WanTransformer, cache: Any) -> None:
    times = dict(cache.times)
    transformer.set_conditions(cache, cache.conditions)
    cache.times.update(times)


def forget(*names: str) -> Callable[[WanTransformer, Any], None]:
    def change(transformer: WanTransformer, cache: Any) -> None:
        for name in names:
            setattr(cache, name, {} if name == "times" else None)

    return change


def read_copies(self: RollingKVCache, tokens: int) -> tuple[Tensor, Tensor]:
    return self.gather(torch.arange(tokens))


def commit_whole(self: WanTransformer, latent: Tensor, timestep: Tensor, cache: Any, input: Any) -> None:
    self._flows(latent, timestep, cache, input)


WITHOUT: dict[str, Callable[[], Any]] = {
    "text keys and values once per prompt": lambda: before_each_pass(encode_text),
    "timestep vectors once per rollout": lambda: before_each_pass(forget("times")),
    "RoPE and slots once per chunk": lambda: before_each_pass(forget("chunk")),
    "camera features once per chunk": lambda: before_each_pass(forget("prepared")),
    "commit without what nobody reads": lambda: mock.patch.object(WanTransformer, "_remember", commit_whole),
    "window read where it lies": lambda: mock.patch.object(RollingKVCache, "read", read_copies),
}
"""What makes the model compute anew, by the saving it undoes."""

FRAMES, FUSED = "frames before commit (time to frames)", "fused commit"
SAVINGS = (*WITHOUT, FRAMES, FUSED)


class Stream:
    """A rollout whose window is full, and the seconds of its chunks."""

    def __init__(self, model: DiffusionModel, work: Work) -> None:
        self.model, self.work = model, work
        config: Any = work.model.transformer
        generator = torch.Generator().manual_seed(0)
        layout = Layout(1, model.transformer.latent_channels, *work.size, ChunkPlan.of(config.len_t))
        length, width = config.text_shape
        slots = {name: torch.randn(1, length, width, generator=generator) for name in ("text", "negative_text")}
        if config.guidance_scale == 1:
            del slots["negative_text"]
        if config.concat_image_mask_to_latent:
            slots["image_latent"] = torch.randn(1, 16, 1, *work.size, generator=generator)
            slots["image_mask"] = torch.ones(1, 4, 1, *work.size)
        conditions = model.transformer.conditions_type.from_dict(slots)
        experts = model.initialize_cache(layout, conditions)
        self.cache = PipelineCache(layout, KeyedNoise(0), conditions, experts, recent=model.recent())
        while layout.plan.span(self.cache.autoregressive_index)[0] < (config.window_size_t or 0):
            self.cache.autoregressive_index += 1
        model.transformer.skip(layout.plan.span(self.cache.autoregressive_index)[0], experts[0])
        self.chunk = self.cache.autoregressive_index

    def next(self) -> tuple[Tensor, float, float]:
        """A chunk's latent, and the seconds until it is there and until it is in the context, if that is not left to
        the chunk after it."""
        config: Any = self.work.model.transformer
        input = None
        if self.work.controlled:
            shape = 1, 64 * config.network.control_channels, config.len_t, *self.work.size
            input = torch.randn(shape, generator=torch.Generator().manual_seed(self.chunk))
        begun = time.perf_counter()
        latent = self.model.generate(self.chunk, self.cache, input)
        made = time.perf_counter()
        if not self.model.config.fused_commit:
            self.model.finalize(self.chunk, self.cache)
        self.chunk += 1
        return latent, made - begun, time.perf_counter() - begun


@contextmanager
def fusing(model: DiffusionModel, fused: bool) -> Generator[None]:
    own, model.config = model.config, replace(model.config, fused_commit=fused)
    try:
        yield
    finally:
        model.config = own


@torch.no_grad()
def compare(name: str, shape: str, repeats: int) -> str:
    """A row of the table: milliseconds of a chunk without and with the saving, and how far latents differ at most."""
    work = with_camera(shape) if name.startswith("camera") else WORK[shape]
    model = work.model.setup()
    streams, taken, difference = (Stream(model, work), Stream(model, work)), ([], []), 0.0
    for turn in range(-2, repeats):  # the first ones warm up
        latents = []
        for saved, stream in enumerate(streams):
            anew = WITHOUT[name]() if name in WITHOUT and not saved else fusing(model, name == FUSED and bool(saved))
            with anew:
                latent, made, done = stream.next()
            latents.append(latent)
            if turn >= 0:
                taken[saved].append(made if name == FRAMES and saved else done)
        difference = max(difference, ((latents[0] - latents[1]).abs().max() / latents[0].abs().max()).item())
    before, after = (1000 * statistics.median(seconds) for seconds in taken)
    change = statistics.median(1 - b / a for a, b in zip(*taken, strict=True))
    equal = "equal to the bit" if difference == 0 else f"{difference:.1e}"
    return f"| {name} | {shape} | {before:.1f} | {after:.1f} | {100 * change:.1f} % | {equal} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=sorted(WORK), default="tiny")
    parser.add_argument("--only", nargs="+", default=[""], help="savings whose name contains one of these")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print("| Saving | Sizes | Without, ms | With, ms | Less time | Latents differ by |\n|---|---|---|---|---|---|")
    for name in SAVINGS:
        if any(part in name for part in options.only):
            print(compare(name, options.shape, options.repeats), flush=True)


if __name__ == "__main__":
    main()

"""What it saves to make the camera's features once per chunk: the same latents, operations and time with and without.

python integrations/lingbot/examples/camera_reuse.py [REPEATS]

Operations are those of one chunk (four denoising passes and the commit) when the window is full, counted, for a small
model, which is also timed, and for the published one, which no memory is needed for: it is on the meta device.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from flashdreams.config import derive_config
from flashdreams.infra.config import TransformerConfig
from flashdreams.infra.layout import ChunkPlan, Layout
from flashdreams.infra.loading import build_on_meta
from flashdreams.recipes.wan.conditions import WanConditions
from lingbot.config import PIPELINE_LINGBOT_WORLD_FAST

PUBLISHED = derive_config(PIPELINE_LINGBOT_WORLD_FAST.diffusion_model.transformer, checkpoint_path=None)
SMALL = derive_config(
    PUBLISHED,
    dtype="float32",
    checkpoint_path="random:0",
    network={"dim": 512, "ffn_dim": 1376, "num_heads": 4, "num_layers": 2, "text_dim": 64},
)


def chunk_of(config: TransformerConfig, rows: int, columns: int, device: str) -> Any:
    """A function that makes one chunk in a full window, and returns the flow of its last step."""
    dtype, frames = getattr(torch, config.dtype), config.len_t
    transformer: Any = build_on_meta(config).to(dtype) if device == "meta" else config.setup()
    layout = Layout(1, 16, rows, columns, ChunkPlan(frames, frames))

    def random(*shape: int) -> torch.Tensor:
        if device == "meta":
            return torch.empty(*shape, dtype=dtype, device=device)
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    network: Any = config.network
    channels = 64 * network.control_channels
    noise, control = random(1, 16, frames, rows, columns), random(1, channels, frames, rows, columns)
    text, image = random(1, 512, network.text_dim), random(1, 16, 1, rows, columns)
    conditions = WanConditions(text, image_latent=image, image_mask=random(1, 4, 1, rows, columns))
    timesteps = [torch.full((1,), value, device=device) for value in (999.0, 967.0, 908.0, 768.0, 0.0)]

    def chunk() -> torch.Tensor:
        cache.start, cache.prepared = config.window_size_t, None
        for timestep in timesteps[:-1]:
            flow = transformer.predict_flow(noise, timestep, cache, control)
        transformer.commit(noise, timestep, cache, control)
        return flow

    with torch.no_grad():
        cache = transformer.initialize_cache(layout, conditions)
    return torch.no_grad()(chunk)


def compare(config: TransformerConfig, rows: int, columns: int, device: str, repeats: int) -> dict[str, float]:
    """Operations of a chunk with and without reuse; on a real device also the median seconds, taken in turns, and the
    largest difference of what is made."""
    with_reuse, without = (
        chunk_of(derive_config(config, reuse_controls=reuse), rows, columns, device) for reuse in (True, False)
    )
    report: dict[str, float] = {}
    for name, chunk in (("with", with_reuse), ("without", without)):
        with FlopCounterMode(display=False) as counter:
            chunk()
        report[f"{name} reuse, operations"] = counter.get_total_flops()
    report["operations saved"] = 1 - report["with reuse, operations"] / report["without reuse, operations"]
    if device == "meta":
        return report
    report["largest difference"] = (with_reuse() - without()).abs().max().item()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(repeats):
        for name, chunk in (("with", with_reuse), ("without", without)):
            begun = time.perf_counter()
            chunk()
            seconds[name].append(time.perf_counter() - begun)
    report |= {f"{name} reuse, seconds": statistics.median(taken) for name, taken in seconds.items()}
    report["time saved"] = 1 - report["with reuse, seconds"] / report["without reuse, seconds"]
    return report


def main(repeats: int = 15) -> None:
    """Print both reports."""
    for title, report in (
        ("small model, 8x12 latent", compare(SMALL, 8, 12, "cpu", repeats)),
        ("published model, 60x104 latent (480x832)", compare(PUBLISHED, 60, 104, "meta", repeats)),
    ):
        print(title)
        for name, value in report.items():
            print(f"  {name}: {f'{value:.1%}' if name.endswith('saved') else f'{value:.4g}'}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Stage ``codec`` (encoder and decoder together) and stage ``decoder`` (latents frozen)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_world._codec import Decoder, Encoder, fold, unfold
from tiny_world._data import SIZE, Clips, render, sample_clips
from tiny_world.train import parallel
from tiny_world.train._loop import Average, Clock, Log, load, rate, save, set_rate
from tiny_world.train.muon import Muon

CHANNELS = 12
WIDTHS = (24, 64, 96, 112)
HELDOUT_SEED = 900_000


@dataclass(frozen=True)
class CodecPlan:
    """Sizes of a step; ``crop`` px windows until ``whole_from`` of the time, whole frames after."""

    muon_lr: float = 3e-3
    adamw_lr: float = 1.2e-3
    flat: float = 0.3
    clips: int = 8
    latents: int = 3
    crop: int = 80
    whole_from: float = 0.8
    noise: float = 0.2
    ema: float = 0.995
    l1: float = 1.0
    l2: float = 2.0


DECODER_PLAN = CodecPlan(muon_lr=2e-3, adamw_lr=1e-3, flat=0.0, noise=0.25, l1=0.5, l2=4.0)


class TrainingCodec(nn.Module):
    """Encoder, batch-normalised noisy bottleneck, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(CHANNELS, WIDTHS)
        self.decoder = Decoder(CHANNELS, WIDTHS)
        self.bottleneck = nn.BatchNorm2d(CHANNELS, affine=False, momentum=0.02, eps=1e-6)

    def encode(self, video: Tensor) -> Tensor:
        """``[B, 3, 1+4n, H, W]`` in [-1, 1] -> unit-variance latent ``[B, 1+n, 12, H/16, W/16]``."""
        first = video[:, :, :1].expand(-1, -1, 3, -1, -1)
        raw = self.encoder(fold(torch.cat([first, video], dim=2)), {})
        return self.bottleneck(raw.flatten(0, 1)).view_as(raw)

    def decode(self, latent: Tensor) -> Tensor:
        """``[B, 1+n, 12, h, w]`` -> video ``[B, 3, 1+4n, H, W]``."""
        return unfold(self.decoder(latent, {}))[:, :, 3:]


def to_video(frames: np.ndarray) -> Tensor:
    """uint8 ``[n, T, H, W, 3]`` -> float ``[n, 3, T, H, W]`` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 4, 1, 2, 3).float().div_(127.5).sub_(1)


def cropped(clips: Clips, size: int, rng: np.random.Generator) -> np.ndarray:
    """Rendered frames cut to ``size`` around the path of the shape, with jitter (16 px grid kept free)."""
    video = render(clips)
    if size >= SIZE:
        return video
    middle = clips.centres.mean(axis=1) + rng.uniform(-16, 16, (len(clips), 2))
    corner = np.clip(middle - size / 2, 0, SIZE - size).astype(int)
    return np.stack([v[:, y : y + size, x : x + size] for v, (x, y) in zip(video, corner, strict=True)])


def edge_weight(video: Tensor) -> Tensor:
    """1 + 6 * dilated gradient magnitude, ``[B, 1, T, H, W]``: edges are few and carry the shape."""
    dx = F.pad((video[..., 1:] - video[..., :-1]).abs(), (0, 1))
    dy = F.pad((video[..., 1:, :] - video[..., :-1, :]).abs(), (0, 0, 0, 1))
    strength = (dx + dy).amax(dim=1).clamp(max=0.5)
    return (1 + 6 * F.max_pool2d(strength, 5, stride=1, padding=2)).unsqueeze(1)


def psnr(codec: TrainingCodec, clips: int = 16, frames: int = 21) -> float:
    """Mean over held-out videos of the PSNR in dB of a noiseless round trip."""
    codec.eval()
    video = to_video(render(sample_clips(HELDOUT_SEED, clips, frames, "heldout")))
    with torch.no_grad():
        error = torch.cat([(codec.decode(codec.encode(v)).clamp(-1, 1) - v) for v in video.split(4)])
    codec.train()
    return float((10 * torch.log10(4 / error.square().mean(dim=(1, 2, 3, 4)))).mean())


@torch.no_grad()
def recalibrate(codec: TrainingCodec, batches: int = 16) -> None:
    """Set the bottleneck statistics to plain means over ``batches`` batches of whole clips."""
    codec.train()
    codec.bottleneck.reset_running_stats()
    codec.bottleneck.momentum = None
    for i in range(batches):
        codec.encode(to_video(render(sample_clips(800_000 + i, 6, 21))))
    codec.eval()


def optimizers(trained: nn.Module, plan: CodecPlan) -> list[torch.optim.Optimizer]:
    """Muon for the inner convolutions; AdamW for biases and for those that touch pixels or latents."""
    inner = {k for k, v in trained.named_parameters() if v.ndim == 4 and not re.search(r"(stem|head)\.weight$", k)}
    matrices = [v for k, v in trained.named_parameters() if k in inner]
    rest = [v for k, v in trained.named_parameters() if k not in inner]
    return [
        Muon(matrices, lr=plan.muon_lr, weight_decay=1e-3),
        torch.optim.AdamW(rest, lr=plan.adamw_lr, betas=(0.9, 0.99), weight_decay=1e-4),
    ]


def train_codec(out: Path, minutes: float, decoder_only: bool = False, seed: int = 0) -> None:
    """Train until ``minutes`` are spent; writes ``codec.pt`` (or ``decoder.pt``) with averaged weights."""
    name, plan = ("decoder", DECODER_PLAN) if decoder_only else ("codec", CodecPlan())
    torch.manual_seed(seed)
    codec = TrainingCodec()
    if decoder_only:
        load_codec(codec, out / "codec.pt")
        codec.encoder.requires_grad_(False)
        codec.bottleneck.eval()
    trained = codec.decoder if decoder_only else codec
    tools = optimizers(trained, plan)
    average = Average(trained, plan.ema)
    step, clock = 0, Clock(minutes)
    if state := load(out / f"{name}_resume.pt"):
        trained.load_state_dict(state["model"])
        for tool, saved in zip(tools, state.get("optimizers", ()), strict=False):
            tool.load_state_dict(saved)
        average.values, step, clock = state["average"], state["step"], Clock(minutes, state["seconds"])
    torch.manual_seed(seed + 1000 * step + parallel.rank())
    log = Log(out / f"{name}.jsonl")
    while (progress := parallel.agree(clock.progress)) < 1:
        draw = step * parallel.workers() + parallel.rank()
        rng = np.random.default_rng([seed, draw])
        whole = progress >= plan.whole_from
        count = (plan.clips // 2 if whole else plan.clips) // parallel.workers()
        clips = sample_clips(1_000_000 * (1 + decoder_only) + draw, count, 4 * plan.latents - 3)
        video = to_video(cropped(clips, SIZE if whole else plan.crop, rng))
        set_rate(tools, rate(progress, step, plan.flat, warmup=50))
        with torch.set_grad_enabled(not decoder_only):
            latent = codec.encode(video)
        sigma = plan.noise * torch.rand(len(video), 1, 1, 1, 1)
        error = codec.decode(latent + sigma * torch.randn_like(latent)) - video
        loss = (edge_weight(video) * (plan.l1 * error.abs() + plan.l2 * error.square())).mean()
        loss.backward()
        parallel.average_gradients(trained)
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        average.update(trained, step)
        if step % 25 == 0 and parallel.rank() == 0:
            log(stage=name, step=step, progress=progress, seconds=clock.seconds, loss=loss.item(),
                mse_psnr=float(10 * torch.log10(4 / error.detach().square().mean())))  # fmt: skip
        step += 1
        if step % 100 == 0 and parallel.rank() == 0:
            save(out / f"{name}_resume.pt", model=trained.state_dict(), optimizers=[t.state_dict() for t in tools],
                 average=average.values, step=step, seconds=clock.seconds)  # fmt: skip
            save_codec(codec, average, trained, out / f"{name}_last.pt", decoder_only)
    if parallel.rank() == 0:
        save_codec(codec, average, trained, out / f"{name}.pt", decoder_only, log=log, step=step)


def save_codec(
    codec: TrainingCodec, average: Average, trained: nn.Module, path: Path, decoder_only: bool,
    log: Log | None = None, step: int = 0,
) -> None:  # fmt: skip
    """Write the averaged weights with recalibrated statistics, leaving ``codec`` as it was."""
    final = TrainingCodec()
    final.load_state_dict(codec.state_dict())
    average.copy_to(final.decoder if decoder_only else final)
    if not decoder_only:
        recalibrate(final, 16 if log else 4)
    if log:
        log(stage=path.stem, step=step, psnr=psnr(final, 48))
    save(path, model=final.state_dict())


def load_codec(codec: TrainingCodec, path: Path) -> None:
    """Load a file of :func:`save_codec`; raises ``FileNotFoundError`` naming the stage to run."""
    state = load(path)
    if state is None:
        raise FileNotFoundError(f"{path} is missing: run `python -m tiny_world.train --stage codec` first")
    codec.load_state_dict(state["model"])
    codec.eval()

"""Stage ``base``: flow matching with teacher forcing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tiny_world.train import parallel
from tiny_world.train._loop import Average, Clock, Log, load, rate, save, set_rate
from tiny_world.train.latents import LatentBank
from tiny_world.train.muon import Muon
from tiny_world.train.packing import Batch, Packing, TrainingModel, flow


@dataclass(frozen=True)
class Group:
    """One forward pass of a step: which clips, how many, how packed, and the loss weight of each target."""

    kind: str
    count: int
    packing: Packing
    from_start: bool
    weights: tuple[float, ...]

    @property
    def length(self) -> int:
        return max(self.packing.positions) + 1

    @property
    def share(self) -> float:
        return self.count * sum(self.weights)


BEGIN = Group("short", 16, Packing(1, (0, 0, 1, 1, 1)), True, (1.0, 1.0, 1.5, 1.5, 1.5))
EARLY = Group("long", 4, Packing(5, (0, 1, 1, 1, 2, 3, 4, 5)), True, (1.0, 1.5, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0))
STEADY = Group("long", 4, Packing(5, (1, 2, 3, 4, 5, 5, 5, 5)), False, (0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0))


@dataclass(frozen=True)
class FlowPlan:
    """Optimisation of a stage."""

    groups: tuple[Group, ...] = (BEGIN, EARLY, STEADY)
    muon_lr: float = 3e-3
    adamw_lr: float = 2e-3
    flat: float = 0.5
    ema: float = 0.995
    context_noise: float = 0.25
    resample_from: float = 0.6
    """Progress after which two in five steps use the averaged model's own one-step estimates as context."""


def shifted(u: Tensor) -> Tensor:
    """Sigma of uniform ``u`` with shift 3, the density of noise levels at inference."""
    return 3 * u / (1 + 2 * u)


def optimizers(model: TrainingModel, plan: FlowPlan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = [p for p in model.network.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, lr=plan.muon_lr),
        torch.optim.AdamW(rest, lr=plan.adamw_lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def noised_context(batch: Batch, clean: int, strength: float) -> Tensor:
    """Context latents, in 60 % of clips with noise of sigma U(0, strength) per frame that the model is not told of."""
    context = batch.latents[:, :clean]
    sigma = strength * torch.rand(len(batch), clean, 1, 1, 1) * (torch.rand(len(batch), 1, 1, 1, 1) < 0.6)
    return (1 - sigma) * context + sigma * torch.randn_like(context)


@torch.no_grad()
def resampled_context(model: TrainingModel, batch: Batch, clean: int, plan: FlowPlan) -> Tensor:
    """Context replaced in half of its frames by one-step estimates: a cheap stand-in for rolling out."""
    packing = Packing(clean, tuple(range(clean)))
    truth = batch.latents[:, :clean]
    sigma = shifted(torch.rand(len(batch), clean))
    wide = sigma[..., None, None, None]
    noisy = (1 - wide) * truth + wide * torch.randn_like(truth)
    v = flow(model, packing, packing.context(), batch, noised_context(batch, clean, plan.context_noise), noisy, sigma)
    keep = torch.rand(len(batch), clean, 1, 1, 1) < 0.5
    return torch.where(keep, noisy - wide * v, truth)


def group_loss(model: TrainingModel, teacher: TrainingModel, group: Group, batch: Batch, plan: FlowPlan,
               resample: bool) -> Tensor:  # fmt: skip
    """Mean squared flow error per target, ``[B, N]``."""
    packing = group.packing
    truth = batch.latents[:, packing.targets]
    sigma = shifted(torch.rand(truth.shape[:2]))
    noise = torch.randn_like(truth)
    wide = sigma[..., None, None, None]
    if resample and group.kind == "long":
        clean = resampled_context(teacher, batch, packing.clean, plan)
    else:
        clean = noised_context(batch, packing.clean, plan.context_noise)
    v = flow(model, packing, packing.context(), batch, clean, (1 - wide) * truth + wide * noise, sigma)
    return (v - (noise - truth)).square().mean(dim=(2, 3, 4))


def train_base(out: Path, minutes: float, seed: int = 0) -> None:
    """Train until ``minutes`` are spent; writes ``base.pt`` with averaged weights, refreshed every 50 steps."""
    plan = FlowPlan()
    torch.manual_seed(seed)
    model, teacher = TrainingModel(), TrainingModel().requires_grad_(False)
    tools = optimizers(model, plan)
    average = Average(model, plan.ema)
    step, clock = 0, Clock(minutes)
    if state := load(out / "base_resume.pt"):
        model.load_state_dict(state["model"])
        for tool, saved in zip(tools, state.get("optimizers", ()), strict=False):
            tool.load_state_dict(saved)
        average.values, step, clock = state["average"], state["step"], Clock(minutes, state["seconds"])
    bank, log = LatentBank(out / "latents"), Log(out / "base.jsonl")
    running: dict[str, float] = {}
    total = sum(group.share for group in plan.groups) / parallel.workers()
    torch.manual_seed(seed + 1000 * step + parallel.rank())
    while (progress := parallel.agree(clock.progress)) < 1:
        rng = np.random.default_rng([seed, step, parallel.rank()])
        resample = progress >= plan.resample_from and step % 5 < 2
        if resample:
            average.copy_to(teacher)
        set_rate(tools, rate(progress, step, plan.flat))
        for group in plan.groups:
            batch = bank.sample(rng, group.kind, group.count // parallel.workers(), group.length, group.from_start)
            losses = group_loss(model, teacher, group, batch, plan, resample)
            ((losses * torch.tensor(group.weights)).sum() / total).backward()
            by_target = losses.detach().mean(dim=0)
            for position in {0, 1, 5} & set(group.packing.targets):
                chosen = [i for i, p in enumerate(group.packing.targets) if p == position]
                name = f"{group.kind}{int(group.from_start)}_{position}"
                running[name] = 0.97 * running.get(name, 1.0) + 0.03 * float(by_target[chosen].mean())
        parallel.average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        average.update(model, step)
        if step % 20 == 0 and parallel.rank() == 0:
            log(stage="base", step=step, progress=progress, seconds=clock.seconds, **running)
        step += 1
        if step % 100 == 0:
            bank.refresh()
        if step % 50 == 0 and parallel.rank() == 0:
            average.copy_to(teacher)
            save(out / "base.pt", model=teacher.state_dict())
            save(out / "base_resume.pt", model=model.state_dict(), average=average.values, step=step,
                 optimizers=[tool.state_dict() for tool in tools], seconds=clock.seconds)  # fmt: skip
    if parallel.rank() == 0:
        average.copy_to(teacher)
        save(out / "base.pt", model=teacher.state_dict())


def load_model(model: TrainingModel, path: Path) -> None:
    """Load the averaged weights of an earlier stage; raises ``FileNotFoundError`` naming the stage to run."""
    state = load(path)
    if state is None:
        raise FileNotFoundError(f"{path} is missing: run `python -m tiny_world.train --stage {path.stem}` first")
    model.load_state_dict(state["model"])

"""Stage ``distill``: progressive distillation onto the four sigmas of inference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tiny_world.train import parallel
from tiny_world.train._loop import Average, Clock, Log, load, rate, save, set_rate
from tiny_world.train.dit import BEGIN, EARLY, STEADY, FlowPlan, Group, load_model, noised_context, optimizers
from tiny_world.train.latents import LatentBank
from tiny_world.train.packing import Batch, Packing, TrainingModel, flow

SIGMAS = (1.0, 0.9, 0.75, 0.5, 0.0)


@dataclass(frozen=True)
class DistillPlan:
    """The teacher takes ``substeps`` Euler steps, guided by ``guidance`` in two-latent clips, inside one interval."""

    groups: tuple[Group, ...] = (
        replace(BEGIN, count=24, packing=Packing(1, (0, 0, 1, 1)), weights=(1.5, 1.5, 1.0, 1.0)),
        replace(EARLY, count=4, packing=Packing(5, (1, 2, 3, 4, 5)), weights=(1.0,) * 5),
        replace(STEADY, count=4, packing=Packing(5, (3, 4, 5, 5, 5)), weights=(1.0,) * 5),
    )
    muon_lr: float = 7.5e-4
    adamw_lr: float = 5e-4
    substeps: int = 4
    guidance: float = 1.5
    ema: float = 0.98


def teacher_flow(
    teacher: TrainingModel, group: Group, batch: Batch, clean: Tensor, noisy: Tensor, sigma: Tensor, guidance: float
) -> Tensor:
    """The teacher's flow, away from its flow for an empty caption where the group starts a clip."""
    context = group.packing.context()
    v = flow(teacher, group.packing, context, batch, clean, noisy, sigma)
    if guidance == 1.0 or group.kind != "short":
        return v
    blank = replace(batch, tokens=torch.zeros_like(batch.tokens))
    free = flow(teacher, group.packing, context, blank, clean, noisy, sigma)
    return free + guidance * (v - free)


def distill_loss(model: TrainingModel, teacher: TrainingModel, group: Group, batch: Batch, plan: DistillPlan) -> Tensor:
    """Squared distance of the student's flow from the teacher's mean flow over one interval, ``[B, N]``."""
    truth = batch.latents[:, group.packing.targets]
    clean = noised_context(batch, group.packing.clean, FlowPlan.context_noise)
    grid = torch.tensor(SIGMAS)
    interval = torch.randint(0, len(SIGMAS) - 1, truth.shape[:2])
    start, stop = grid[interval], grid[interval + 1]
    wide = start[..., None, None, None]
    noisy = (1 - wide) * truth + wide * torch.randn_like(truth)
    with torch.no_grad():
        x, sigma, delta = noisy, start, (stop - start) / plan.substeps
        for _ in range(plan.substeps):
            v = teacher_flow(teacher, group, batch, clean, x, sigma, plan.guidance)
            x = x + delta[..., None, None, None] * v
            sigma = sigma + delta
        target = (x - noisy) / (stop - start)[..., None, None, None]
    v = flow(model, group.packing, group.packing.context(), batch, clean, noisy, start)
    return (v - target).square().mean(dim=(2, 3, 4))


def train_distilled(out: Path, minutes: float, seed: int = 0) -> None:
    """Train until ``minutes`` are spent; writes ``distill.pt`` with averaged weights, refreshed every 20 steps."""
    plan = DistillPlan()
    torch.manual_seed(seed)
    model, teacher = TrainingModel(), TrainingModel().requires_grad_(False)
    for each in (model, teacher):
        load_model(each, out / "base.pt")
    tools = optimizers(model, FlowPlan(muon_lr=plan.muon_lr, adamw_lr=plan.adamw_lr))
    average = Average(model, plan.ema)
    step, clock = 0, Clock(minutes)
    if state := load(out / "distill_resume.pt"):
        model.load_state_dict(state["model"])
        average.values, step, clock = state["average"], state["step"], Clock(minutes, state["seconds"])
    bank, log, running = LatentBank(out / "latents"), Log(out / "distill.jsonl"), {}
    final = TrainingModel()
    total = sum(group.share for group in plan.groups) / parallel.workers()
    torch.manual_seed(seed + 1000 * step + parallel.rank())
    while (progress := parallel.agree(clock.progress)) < 1:
        rng = np.random.default_rng([seed, step, parallel.rank(), 8])
        set_rate(tools, rate(progress, step, 0.3))
        for i, group in enumerate(plan.groups):
            batch = bank.sample(rng, group.kind, group.count // parallel.workers(), group.length, group.from_start)
            losses = distill_loss(model, teacher, group, batch, plan)
            ((losses * torch.tensor(group.weights)).sum() / total).backward()
            name = f"{group.kind}{i}"
            running[name] = 0.9 * running.get(name, float(losses.detach().mean())) + 0.1 * float(losses.detach().mean())
        parallel.average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        average.update(model, step)
        if step % 10 == 0 and parallel.rank() == 0:
            log(stage="distill", step=step, progress=progress, seconds=clock.seconds, **running)
        step += 1
        if step % 20 == 0 and parallel.rank() == 0:
            average.copy_to(final)
            save(out / "distill.pt", model=final.state_dict())
            save(out / "distill_resume.pt", model=model.state_dict(), average=average.values, step=step,
                 seconds=clock.seconds)  # fmt: skip
    if parallel.rank() == 0:
        average.copy_to(final)
        save(out / "distill.pt", model=final.state_dict())

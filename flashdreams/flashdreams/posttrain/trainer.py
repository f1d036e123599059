"""The training loop: sample groups, judge them, compare, and step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flashdreams.core.noise import stream_key
from flashdreams.infra.errors import UserError
from flashdreams.posttrain.config import TrainConfig
from flashdreams.posttrain.evaluation import evaluate
from flashdreams.posttrain.journal import Journal
from flashdreams.posttrain.objectives import OBJECTIVES, Objective
from flashdreams.posttrain.reward import Reward
from flashdreams.posttrain.sampling import Batch, sample_groups
from flashdreams.posttrain.state import FILE, load_state, save_state
from flashdreams.posttrain.weights import trained_weights
from flashdreams.rollout.advantages import group_advantages

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

FREE = ("iterations", "eval_every", "save_every", "videos")
"""Settings that a training may go on with other values of."""


class Trainer:
    """Trains ``pipeline`` by ``reward`` as ``config`` says. Everything it makes is in ``folder``:
    ``metrics.jsonl``, ``state.safetensors``, the LoRA or the weights, and sample videos.

    Every random number is keyed by the seed and the number of the iteration, and the state is written between
    iterations: a training that was ended and goes on makes the numbers of one that was not.

    Args:
        resume: go on with what ``folder`` holds.
        say: is told of each line of the journal.

    Raises:
        UserError: ``folder`` holds a training already, or none to resume, or one with other settings.
    """

    def __init__(
        self,
        config: TrainConfig,
        pipeline: StreamInferencePipeline,
        reward: Reward,
        folder: Path,
        *,
        resume: bool = False,
        say: Callable[[str, int, dict[str, float]], None] = lambda kind, iteration, values: None,
    ) -> None:
        config.validate()
        if (folder / FILE).exists() and not resume:
            raise UserError(f"{folder} holds a training already; give --resume to go on with it, or another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.config, self.pipeline, self.reward, self.folder, self._say = config, pipeline, reward, folder, say
        self.weights = trained_weights(pipeline, config.method, config.rank, config.seed)
        self.optimizer = torch.optim.AdamW(self.weights.parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.objective: Objective = OBJECTIVES[config.algorithm](pipeline, config)
        self.iteration = 0
        if resume:
            trained, self.iteration = load_state(folder, self.optimizer, self.made_with)
            self.weights.load_state_dict(trained)
            pipeline.diffusion_model.weights_changed()
        self.journal = Journal(folder, after=self.iteration if resume else None)

    @property
    def made_with(self) -> dict[str, Any]:
        """Plain data that decides the numbers of this training."""
        settings = {name: value for name, value in asdict(self.config).items() if name not in FREE}
        settings |= {
            name: None if settings[name] is None else str(settings[name]) for name in ("prompts", "eval_prompts")
        }
        return settings | {
            "model": self.pipeline.config.name,
            "reward": self.reward.config.name,
            "plan": self.objective.plan.digest,
            "checkpoint": self.pipeline.checkpoint_digests(),
        }

    def run(self) -> list[Path]:
        """Train to the last iteration; returns the files for serving."""
        config = self.config
        if not self.iteration:
            self.evaluate()
        while self.iteration < config.iterations:
            self.step()
            if self.iteration == config.iterations or (config.eval_every and self.iteration % config.eval_every == 0):
                self.evaluate()
            if self.iteration % config.save_every == 0:
                self.save()
        self.journal.close()
        return self.save()

    def step(self) -> None:
        """One iteration."""
        config, begun = self.config, time.perf_counter()
        seed = stream_key(config.seed, "train", self.iteration, 0, "samples")
        prompts = self._prompts(config.groups, seed)
        batches = sample_groups(
            self.pipeline, self.objective.plan, prompts, group_size=config.group_size, batch=config.batch,
            num_chunk=config.num_chunk, first_chunk=config.first_chunk, seed=seed,
        )  # fmt: skip
        scores = [self.reward.score(batch.frames, batch.prompts) for batch in batches]
        joined = {name: torch.cat([score[name] for score in scores]).double() for name in scores[0]}
        groups = [i // config.group_size for i in range(len(joined["reward"]))]
        advantages = group_advantages(joined["reward"], groups, global_std=True).float()
        metrics = {name: float(values.mean()) for name, values in joined.items()}
        spread = joined["reward"].view(-1, config.group_size).std(dim=1).mean()
        metrics |= {"reward_spread": float(spread), "sample_seconds": time.perf_counter() - begun}
        self.objective.begin()
        begun = time.perf_counter()
        for update in range(config.updates):
            metrics |= self._update(batches, advantages, update)
        metrics["update_seconds"] = time.perf_counter() - begun
        self.iteration += 1
        self._write("train", metrics)

    def evaluate(self) -> None:
        """Measure on prompts that are held out."""
        config = self.config
        if not config.eval_samples:
            return
        prompts = self._prompts(config.eval_samples, 0, held_out=True)
        videos = {i: self.folder / "videos" / f"{self.iteration:04d}-{i}.mp4" for i in range(config.videos)}
        values = evaluate(
            self.pipeline, self.reward, prompts, num_chunk=config.eval_chunks, batch=config.batch, videos=videos
        )
        self._write("eval", values)

    def save(self) -> list[Path]:
        """Write the state, and what serving reads."""
        save_state(self.folder, self.weights.state_dict(), self.optimizer, self.iteration, self.made_with)
        return self.weights.export(self.folder)

    def _update(self, batches: list[Batch], advantages: Tensor, update: int) -> dict[str, float]:
        """One step of the optimiser on all samples; each batch counts by its number of them."""
        self.optimizer.zero_grad(set_to_none=True)
        found: list[dict[str, float]] = []
        shares = advantages.split([len(batch.prompts) for batch in batches])
        terms = len(range(self.config.first_chunk, self.config.num_chunk)) * self._terms
        for batch, share in zip(batches, shares, strict=True):
            scale = len(share) / len(advantages) / terms
            for loss in self.objective.losses(batch.segment, share, update):
                (loss.value * scale).backward()
                found.append(loss.metrics | {"loss": float(loss.value.detach())})
        norm = nn.utils.clip_grad_norm_(self.weights.parameters, self.config.max_grad_norm)
        if not bool(norm.isfinite()):
            raise UserError(f"the gradient is not finite in iteration {self.iteration + 1}; a lower --lr may help")
        self.optimizer.step()
        self.weights.merge()
        self.pipeline.diffusion_model.weights_changed()
        return _joined(found) | {"gradient_norm": float(norm)}

    @property
    def _terms(self) -> int:
        """Losses of each trained chunk."""
        return len(self.config.steps if self.config.algorithm == "grpo" else self.config.sigmas)

    def _prompts(self, count: int, seed: int, *, held_out: bool = False) -> list[str]:
        """Of a file, a stretch that moves on with each iteration, or of the reward."""
        path = self.config.eval_prompts if held_out else self.config.prompts
        if path is None:
            if not self.reward.config.has_prompts:
                raise UserError(
                    f"{self.reward.config.name} has no prompts; give --prompts FILE and --eval-prompts FILE"
                )
            return self.reward.prompts(count, seed, held_out=held_out)
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise UserError(f"{path} holds no prompts; expected one per line")
        begin = 0 if held_out else self.iteration * count
        return [lines[(begin + i) % len(lines)] for i in range(count)]

    def _write(self, kind: str, values: dict[str, float]) -> None:
        self.journal.write(kind, self.iteration, values)
        self._say(kind, self.iteration, values)


def _joined(metrics: Iterable[dict[str, float]]) -> dict[str, float]:
    """Means over losses; the least and the greatest of what is named so."""
    columns: dict[str, list[float]] = {}
    for each in metrics:
        for name, value in each.items():
            columns.setdefault(name, []).append(value)
    return {
        name: max(values)
        if name.endswith("_max")
        else min(values)
        if name.endswith("_min")
        else sum(values) / len(values)
        for name, values in columns.items()
    }

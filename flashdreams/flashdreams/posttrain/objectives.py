"""One pass over the samples of an iteration: losses of each trained chunk, with a backward pass after each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flashdreams.core.noise import KeyedNoise
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.infra.scheduler.kernels import add_noise
from flashdreams.infra.scheduler.transitions import Kernel
from flashdreams.posttrain.config import TrainConfig
from flashdreams.rollout.checks import check_segment
from flashdreams.rollout.flows import Query, flows
from flashdreams.rollout.losses import Loss, flow_grpo
from flashdreams.rollout.losses_nft import diffusion_nft
from flashdreams.rollout.plan import Plan, plan_for
from flashdreams.rollout.replay import replay_each
from flashdreams.rollout.segment import Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


class Objective(Protocol):
    """How samples and their advantages become gradients."""

    plan: Plan
    """How samples are drawn."""

    def begin(self) -> None:
        """Other samples come from now on."""
        ...

    def losses(self, segment: Segment, advantages: Tensor, update: int) -> Iterator[Loss]:
        """Terms whose mean is the objective, each to go ``backward`` from before the next is asked for.

        Args:
            advantages: ``[B]``.
            update: how many times the weights have changed since ``segment`` was sampled.
        """
        ...


class Grpo:
    """Clipped policy gradient on replayed log-probabilities (Flow-GRPO; with few stochastic steps, MixGRPO)."""

    def __init__(self, pipeline: StreamInferencePipeline, config: TrainConfig) -> None:
        self.pipeline, self.config = pipeline, config
        self.plan = plan_for(pipeline)
        if not any(step.kernel.std(step.sigma, step.sigma_next) for step in self.plan.steps):
            rows = [*[()] * config.first_chunk, config.steps]
            self.plan = plan_for(
                pipeline, sde=Kernel.from_dict({"name": config.kernel, "eta": config.eta}), stochastic=rows
            )

    def begin(self) -> None:
        """Nothing is kept of samples."""

    def losses(self, segment: Segment, advantages: Tensor, update: int) -> Iterator[Loss]:
        """Of each (chunk, step) that drew noise. At the first update every ratio is exactly 1."""
        config = self.config
        entries = [(c, s) for c, s in segment.scored if c >= config.first_chunk and s in config.steps]
        if not entries:
            raise ValueError(f"steps {config.steps} draw no noise here; those that do: {segment.scored}")
        weights = "any" if update else "recorded"
        for scored in replay_each(self.pipeline, segment, entries, weights=weights):
            old = segment.log_probs([(scored.chunk, scored.step)]).to(scored.log_prob)
            yield flow_grpo(scored.log_prob[:, None], old, advantages.to(old), clip=config.clip)


class Nft:
    """DiffusionNFT: the flow at noised samples is drawn to good ones and away from bad ones."""

    def __init__(self, pipeline: StreamInferencePipeline, config: TrainConfig) -> None:
        self.pipeline, self.config = pipeline, config
        self.plan = plan_for(pipeline)
        self._old: dict[tuple[tuple[str, ...], int, float], Tensor] = {}

    def begin(self) -> None:
        """Forget the old flows."""
        self._old.clear()

    def losses(self, segment: Segment, advantages: Tensor, update: int) -> Iterator[Loss]:
        """Of each trained chunk at each noise level; the old flow is that of the weights that sampled."""
        config, device = self.config, self.pipeline.device
        check_segment(self.pipeline, segment, "any")
        assert segment.seed is not None
        assert segment.sample_ids is not None
        ids = tuple(segment.sample_ids)
        noise = KeyedNoise(segment.seed, ids, component="forward")
        terms, queries = [], []
        for chunk in segment.chunks[config.first_chunk :]:
            clean = chunk.clean[VIDEO].to(device, torch.float32)
            for level, sigma in enumerate(config.sigmas):
                drawn = noise.step(chunk.index, level, chunk.start, clean.shape).to(device)
                terms.append((chunk, clean, sigma))
                timestep = torch.full((len(clean),), 1000 * sigma, device=device)
                queries.append(Query(chunk.index, add_noise(clean, drawn, sigma), timestep, sigma))
        predicted = flows(self.pipeline, segment, queries)
        for (chunk, clean, sigma), query, flow in zip(terms, queries, predicted, strict=True):
            term = ids, chunk.index, sigma
            if not update:
                self._old[term] = flow.detach()
            yield diffusion_nft(
                flow, self._old[term], clean, query.x, sigma, advantages.to(device), beta=config.beta,
                mask=None if chunk.mask is None else chunk.mask.to(device),
            )  # fmt: skip


OBJECTIVES: dict[str, type[Grpo] | type[Nft]] = {"grpo": Grpo, "nft": Nft}

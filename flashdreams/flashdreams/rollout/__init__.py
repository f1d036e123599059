"""Rollout and replay: the sampler that serves is the sampler that trains."""

from flashdreams.infra.scheduler.transitions import Kernel, transition
from flashdreams.rollout.facts import TrainerFacts, trainer_facts
from flashdreams.rollout.flows import predict_noise_at_step
from flashdreams.rollout.plan import Plan, PlanError, check_sigmas, plan_for
from flashdreams.rollout.recorder import record
from flashdreams.rollout.replay import ReplayResult, Scored, replay, replay_each
from flashdreams.rollout.rollout import decode, rollout
from flashdreams.rollout.segment import Chunk, Event, Segment

__all__ = [
    "Chunk",
    "Event",
    "Kernel",
    "Plan",
    "PlanError",
    "ReplayResult",
    "Scored",
    "Segment",
    "TrainerFacts",
    "check_sigmas",
    "decode",
    "plan_for",
    "predict_noise_at_step",
    "record",
    "replay",
    "replay_each",
    "rollout",
    "trainer_facts",
    "transition",
]

"""What must match before a segment is replayed. Each mismatch is a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flashdreams.rollout.plan import PlanError, check_sigmas
from flashdreams.rollout.recorder import sigmas_of
from flashdreams.rollout.segment import Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

Weights = Literal["recorded", "any"]


def check_segment(pipeline: StreamInferencePipeline, segment: Segment, weights: Weights) -> None:
    """Raise :class:`PlanError` unless ``segment`` can be replayed on ``pipeline``.

    Args:
        weights: ``recorded``: the weights must be those it was made with. ``any``: they may have changed since.
    """
    plan = segment.plan
    if plan.digest != segment.digest:
        raise PlanError(f"the segment's plan has digest {plan.digest[:12]}; the one that ran had {segment.digest[:12]}")
    plan.check(pipeline)
    for number, chunk in enumerate(segment.chunks):
        span = segment.frames.span(number)
        if chunk.index != number or (chunk.start, chunk.stop) != span:
            raise PlanError(
                f"entry {number} of the segment is chunk {chunk.index}, frames {chunk.start} to {chunk.stop}; expected "
                f"chunk {number}, frames {span[0]} to {span[1]}: a segment goes on from its beginning without gaps"
            )
        origin = segment.origin(number)
        visible = plan.visible(chunk.stop, origin)
        if chunk.kv_length != visible:
            raise PlanError(
                f"chunk {number} was made with {chunk.kv_length} latent frames in sight; replay would have {visible}"
            )
        if chunk.sigmas:
            steps = plan.steps_of(number, first=chunk.start == origin)
            check_sigmas(sigmas_of(steps), chunk.sigmas)
            drawn = {step.index for step in steps if step.kernel.std(step.sigma, step.sigma_next) > 0}
            if drawn != set(chunk.steps):
                raise PlanError(f"chunk {number} drew noise at steps {list(chunk.steps)}; the plan has {sorted(drawn)}")
    _check_weights(pipeline, segment, weights)


def _check_weights(pipeline: StreamInferencePipeline, segment: Segment, weights: Weights) -> None:
    if weights == "any":
        return
    here = pipeline.diffusion_model.weight_version
    for chunk in segment.chunks:
        if chunk.weight_version != here:
            raise PlanError(
                f"chunk {chunk.index} was made with version {chunk.weight_version} of the weights; they are at version "
                f"{here} here. To score it under changed weights, say weights='any'"
            )

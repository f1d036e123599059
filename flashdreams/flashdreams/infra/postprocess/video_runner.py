"""A slug that works on a video file: what its model makes of it, of the same length, in another file."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from flashdreams.core.lengths import chunks_for
from flashdreams.core.media import MediaError
from flashdreams.core.media.sound import copy_sound
from flashdreams.core.media.source import VideoSource, open_video
from flashdreams.core.media.video import VideoWriter
from flashdreams.infra.config import PipelineConfig, RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.framing import Framing
from flashdreams.infra.postprocess.config import ChainConfig, PipelinePostprocessorConfig, VideoRunnerConfig
from flashdreams.infra.postprocess.pipeline import PipelinePostprocessor
from flashdreams.infra.rollout import Chunk
from flashdreams.infra.runner import Plan, Runner

_BATCH = 8
"""Frames that are read at a time."""

REFUSED = {
    "num_chunk": "the video is as long as the file",
    "num_frames": "the video is as long as the file",
    "duration": "the video is as long as the file",
    "height": "the size is that of the file, times the model's scale",
    "width": "the size is that of the file, times the model's scale",
    "strict_size": "every size can be made",
    "fps": "the frame rate is the file's",
    "image": "it works on a video file",
    "last_image": "it works on a video file",
    "example_data": "it works on a video file",
    "control": "the file's frames are its controls",
    "save_control": "the file's frames are its controls",
    "prompt": "it is made from a video alone",
    "prompt_file": "it is made from a video alone",
    "negative_prompt": "it is made from a video alone",
    "prompt_embeds": "it is made from a video alone",
    "save_embeds": "it is made from a video alone",
}
"""Flags that a slug of this kind does not take, and why."""


class VideoRunner(Runner):
    """Reads ``--video`` frame by frame and writes what the model makes of it, with the sound of the file."""

    config: VideoRunnerConfig

    @cached_property
    def source(self) -> VideoSource:
        """The file, which has been decoded once from end to end."""
        config = self.config
        for field in fields(config):
            if field.name in REFUSED and getattr(config, field.name) != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                raise UserError(f"{config.runner_name} takes no {flag}: {REFUSED[field.name]}; leave it out")
        if config.video is None:
            raise UserError(f"{config.runner_name} works on a video file; give one (--video FILE)")
        source = open_video(config.video)
        if self.output.exists() and os.path.samefile(self.output, source.path):
            raise UserError(f"--output {self.output} is the video that is to be read; give another name")
        return source

    def _prompt(self) -> str:
        return ""

    def _fps(self, pipeline: PipelineConfig) -> Fraction:
        return self.source.fps

    def _framing(self, pipeline: PipelineConfig, fps: Fraction, postprocess: ChainConfig) -> Framing:
        source = self.source
        height, width = self._postprocessor(pipeline).output_size(source.height, source.width)
        chunks = chunks_for(source.frames, pipeline.frames_until)
        latent = pipeline.plan().frames_until(chunks)
        return Framing(height, width, chunks, None, latent, from_video=True)

    def _postprocessor(self, pipeline: PipelineConfig) -> PipelinePostprocessorConfig:
        config = self.config
        return PipelinePostprocessorConfig(
            name=config.runner_name, description=config.description, pipeline=pipeline, scale=config.scale
        )

    def _chunks(self, pipeline: Any, plan: Plan) -> Generator[Chunk]:
        source, model = self.source, PipelinePostprocessor(self._postprocessor(plan.pipeline), plan.device, pipeline)
        state = model.open(source.height, source.width, source.fps, plan.seed)
        with state.rollout:
            try:
                for frames in source.read(_BATCH):
                    yield from model.chunks(torch.from_numpy(frames), state)
            except MediaError as error:  # the file is not what it was when it was looked at
                raise UserError(str(error)) from None
            yield from model.rest(state)

    def _as_run(self, plan: Plan) -> RunnerConfig:
        return replace(self.config, seed=plan.seed)

    def _finish(self, plan: Plan, writer: VideoWriter, interrupted: bool, *rest: Any) -> None:
        source = self.source
        made = writer.num_frames / writer.fps
        copy_sound(source.path, plan.output, source.start, source.start + made if interrupted else None)
        super()._finish(plan, writer, interrupted, *rest)

"""One run of the command line: check everything, generate chunk by chunk, write the video as it grows."""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.checkpoint import CheckpointError, read_header, resolve_path
from flashdreams.core.lengths import resolve_length
from flashdreams.core.media import MediaError
from flashdreams.core.media.fps import parse_fps
from flashdreams.core.media.image import read_image
from flashdreams.core.media.sheet import contact_sheet
from flashdreams.core.media.video import VideoWriter
from flashdreams.core.noise import check_seed
from flashdreams.core.notices import say_once
from flashdreams.core.sizes import snap_size
from flashdreams.infra.config import PipelineConfig, RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.load import resolve_device
from flashdreams.infra.metrics import RunMetrics
from flashdreams.infra.record import write_record
from flashdreams.infra.rollout import Rollout

MAX_PROMPT = 20_000
"""Characters; far beyond what any text encoder reads."""


@dataclass(frozen=True)
class Plan:
    """A run, checked: what the flags mean once everything is known to be in order."""

    pipeline: PipelineConfig
    prompt: str
    seed: int
    num_chunk: int
    height: int
    width: int
    fps: Fraction
    device: str
    output: Path
    image: torch.Tensor | None = None
    control: Any = None


class Runner:
    """Runs one slug as its config says."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config

    def plan(self) -> Plan:
        """Check every flag before any long work.

        Raises:
            UserError: with the value, what was expected, and what to do.
        """
        try:
            return self._plan()
        except (MediaError, CheckpointError, ConfigError, ValueError) as error:
            raise UserError(str(error)) from None

    def _plan(self) -> Plan:
        config = self.config
        prompt = self._prompt()
        pipeline = self._pipeline_config()
        seed = check_seed(secrets.randbits(63) if config.seed is None else config.seed)
        fps = parse_fps(config.fps) if config.fps is not None else Fraction(pipeline.fps).limit_denominator(1001)
        height, width = snap_size(
            pipeline.height if config.height is None else config.height,
            pipeline.width if config.width is None else config.width,
            pipeline.size_multiple,
            strict=config.strict_size,
        )
        given = 0 if config.image is None else 1
        num_chunk = resolve_length(
            num_chunk=config.num_chunk,
            num_frames=config.num_frames,
            duration=config.duration,
            default_num_frames=config.default_num_frames,
            fps=fps,
            frames_until=lambda chunks: pipeline.frames_until(chunks, given),
        )
        image = None
        if config.image is not None:
            image = torch.from_numpy(read_image(config.image, height, width).pixels)
        control = None
        if config.control is not None:
            if pipeline.encoder is None:
                raise UserError(f"{config.runner_name} takes no controls; leave --control out")
            control = pipeline.encoder.parse_controls(self._text_or_file(config.control))
        for source in _checkpoints(pipeline):
            read_header(resolve_path(source))
        trained = pipeline.diffusion_model.transformer.trained_frames
        latent = pipeline.plan(given).frames_until(num_chunk)
        if trained is not None and latent > trained:
            say_once(
                f"this checkpoint was trained for {trained} latent frames and will make {latent}: "
                "expect drift or flicker beyond; a preset made for long rollouts does better"
            )
        output = config.output or Path("outputs") / f"{config.runner_name}.mp4"
        device = resolve_device(config.device)
        return Plan(pipeline, prompt, seed, num_chunk, height, width, fps, device, output, image, control)

    def run(self) -> Path:
        """Make the video; returns its path. Whatever was generated when an error or a signal comes is kept."""
        plan = self.plan()
        if self.config.seed is None:
            print(f"seed {plan.seed}", file=sys.stderr)
        metrics = RunMetrics()
        try:
            writer = VideoWriter(plan.output, plan.fps, plan.height, plan.width)
        except MediaError as error:
            raise UserError(str(error)) from None
        interrupted = True
        digests: dict[str, str | None] = {}
        sheet = _Sheet(24) if self.config.preview else None
        try:
            with terminate_as_interrupt(), writer:
                begun = time.perf_counter()
                pipeline = self._load(plan)
                digests = pipeline.checkpoint_digests()
                metrics.load = time.perf_counter() - begun
                metrics.start()
                with pipeline.rollout(
                    plan.prompt, seed=plan.seed, num_chunk=plan.num_chunk, negative_prompt=self.config.negative_prompt,
                    image=plan.image, control=plan.control, height=plan.height, width=plan.width,
                ) as rollout:  # fmt: skip
                    self._generate(rollout, plan, writer, metrics, sheet)
            interrupted = False
        finally:
            metrics.stop()
            if metrics.frames:
                self._finish(plan, metrics, digests, sheet, interrupted)
        return plan.output

    def _load(self, plan: Plan) -> Any:
        try:
            return plan.pipeline.setup(device=plan.device)
        except (CheckpointError, ConfigError) as error:
            raise UserError(str(error)) from None

    def _generate(
        self, rollout: Rollout, plan: Plan, writer: VideoWriter, metrics: RunMetrics, sheet: _Sheet | None
    ) -> None:
        with tqdm(total=plan.num_chunk, unit="chunk", desc=self.config.runner_name, disable=None) as bar:
            for chunk in rollout:
                if chunk.index == 0 and not torch.isfinite(chunk.latent).all():
                    raise UserError(
                        "the first chunk holds NaN or infinity: the weights do not fit the config, or "
                        f"{plan.pipeline.diffusion_model.transformer.dtype} overflows; try --dtype float32"
                    )
                frames = chunk.frames.numpy()
                writer.write(frames)
                metrics.add(chunk, len(frames))
                if sheet is not None:
                    sheet.add(frames)
                bar.update()
                bar.set_postfix_str(f"{metrics.fps:.1f} FPS, first frame {metrics.first_frame:.2f} s", refresh=False)
            rollout.flush()

    def _finish(
        self, plan: Plan, metrics: RunMetrics, digests: dict[str, str | None], sheet: _Sheet | None, interrupted: bool
    ) -> None:
        config = replace(self.config, seed=plan.seed, height=plan.height, width=plan.width, fps=str(plan.fps))
        output = {
            "file": plan.output.name,
            "frames": metrics.frames,
            "fps": str(plan.fps),
            "height": plan.height,
            "width": plan.width,
            "guidance_scale": plan.pipeline.diffusion_model.transformer.guidance_scale,
            "interrupted": interrupted,
        }
        write_record(
            plan.output.with_suffix(".json"), config, seed=plan.seed, device=plan.device, checkpoint=digests,
            timings=metrics.summary(), output=output,
        )  # fmt: skip
        if sheet is not None:
            contact_sheet(sheet.frames(), plan.output.with_suffix(".png"))
        print(metrics.lines(), file=sys.stderr)
        print(f"{plan.output}  {metrics.frames} frames, {plan.width}x{plan.height}, {plan.fps} fps")

    def _prompt(self) -> str:
        config = self.config
        prompt = config.prompt
        if config.prompt_file is not None:
            prompt = self._read(config.prompt_file, "--prompt-file").strip()
        for name, text in (("prompt", prompt), ("negative prompt", config.negative_prompt or "")):
            if len(text) > MAX_PROMPT:
                raise UserError(f"the {name} has {len(text)} characters; at most {MAX_PROMPT} are taken: shorten it")
        if not prompt.strip():
            raise UserError("the prompt is empty; say in a few words what the video shows (--prompt)")
        return prompt

    def _text_or_file(self, text: str) -> str:
        looks_like_file = len(text) < 4096 and "\n" not in text and Path(text).suffix in (".txt", ".csv", ".json")
        return self._read(Path(text), "--control") if looks_like_file else text

    @staticmethod
    def _read(path: Path, flag: str) -> str:
        try:
            if path.stat().st_size > 10 * MAX_PROMPT:
                raise UserError(f"{flag} {path} has {path.stat().st_size} bytes; at most {10 * MAX_PROMPT} are read")
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{flag} {path} cannot be read as text: {error}") from None

    def _pipeline_config(self) -> PipelineConfig:
        """The pipeline with the runner's own flags applied."""
        config = self.config
        changes: dict[str, Any] = {}
        if config.guidance_scale is not None:
            changes["guidance_scale"] = config.guidance_scale
        if config.dtype is not None:
            changes["dtype"] = config.dtype
        if config.ckpt_path is not None:
            own = config.pipeline.diffusion_model.transformer
            declared = dict.fromkeys(filter(None, (own.state_dict_transform, *own.transforms)))
            changes |= {
                "checkpoint_path": config.ckpt_path,
                "state_dict_transform": config.ckpt_transform,
                "transforms": tuple(declared),
            }
        elif config.ckpt_transform is not None:
            raise UserError("--ckpt-transform renames the keys of --ckpt-path, which is not given")
        scheduler = {} if config.num_steps is None else {"num_steps": config.num_steps}
        pipeline = derive_config(config.pipeline, diffusion_model={"transformer": changes, "scheduler": scheduler})
        pipeline.validate_tree()
        return pipeline


class _Sheet:
    """Evenly spaced frames of a run of unknown length, in constant memory: every n-th, n doubling as needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stride = 1
        self.seen = 0
        self.kept: list[Any] = []

    def add(self, frames: Any) -> None:
        for frame in frames:
            if self.seen % self.stride == 0:
                self.kept.append(frame)
            self.seen += 1
            if len(self.kept) > 2 * self.count:
                self.kept, self.stride = self.kept[::2], 2 * self.stride

    def frames(self) -> Any:
        import numpy as np

        return np.stack(self.kept)


def _checkpoints(config: Any) -> list[str]:
    """Every checkpoint that stands in a config tree."""
    from flashdreams.config import nested_configs

    own = getattr(config, "checkpoint_path", None)
    return ([own] if own else []) + [path for child in nested_configs(config) for path in _checkpoints(child)]


@contextmanager
def terminate_as_interrupt() -> Generator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that its files are finished."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

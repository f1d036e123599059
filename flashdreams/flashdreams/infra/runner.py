"""One run of the command line: check everything, generate chunk by chunk, write the video as it grows."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.checkpoint import CheckpointError, open_checkpoint, parse_source
from flashdreams.core.checkpoint.sources import RandomSource
from flashdreams.core.media import MediaError
from flashdreams.core.media.fps import parse_fps
from flashdreams.core.media.sheet import contact_sheet
from flashdreams.core.media.video import VideoWriter
from flashdreams.core.noise import check_seed
from flashdreams.core.notices import say_once
from flashdreams.infra.config import PipelineConfig, RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.examples import with_example_data
from flashdreams.infra.framing import Framing, frame_run
from flashdreams.infra.health import check_chunk
from flashdreams.infra.load import resolve_device, with_checkpoints_from
from flashdreams.infra.lora_flag import LoraChoice, check_loras, load_loras, parse_loras
from flashdreams.infra.metrics import RunMetrics
from flashdreams.infra.preview import FrameSample
from flashdreams.infra.prompts import GivenPrompts, PromptEncoder, load_embeds, save_embeds
from flashdreams.infra.record import write_record
from flashdreams.infra.rollout import Rollout
from flashdreams.infra.scheduler.config import with_solver
from flashdreams.infra.signals import terminate_as_interrupt

MAX_PROMPT = 20_000
"""Characters; far beyond what any text encoder reads."""


@dataclass(frozen=True)
class Plan:
    """A run, checked: what the flags mean once everything is known to be in order."""

    pipeline: PipelineConfig
    prompt: str
    seed: int
    framing: Framing
    fps: Fraction
    device: str
    output: Path
    control: Any = None
    embeds: dict[str, torch.Tensor] | None = None
    """Embeddings in place of a text encoder, which ``pipeline`` then lacks."""
    loras: tuple[LoraChoice, ...] = ()


class Runner:
    """Runs one slug as its config says."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = with_example_data(config)

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
        framing = frame_run(config, pipeline, fps)
        control = None
        if config.control is not None:
            if pipeline.encoder is None:
                raise UserError(f"{config.runner_name} takes no controls; leave --control out")
            control = pipeline.encoder.parse_controls(self._text_or_file(config.control))
        embeds = None
        if config.prompt_embeds is not None:
            embeds = load_embeds(config.prompt_embeds, pipeline)
            pipeline = derive_config(pipeline, text_encoder=None)
            say_once(f"the embeddings in {config.prompt_embeds} are used; the prompt is recorded and not encoded")
        elif pipeline.text_encoder is None:
            raise UserError(f"{config.runner_name} has no text encoder; give saved embeddings (--prompt-embeds FILE)")
        else:
            pipeline.text_encoder.identity()
        for source in _checkpoints(pipeline):
            open_checkpoint(source)
        loras = parse_loras(config.lora)
        check_loras(pipeline, loras)
        trained = pipeline.diffusion_model.transformer.trained_frames
        if trained is not None and framing.latent_frames > trained:
            say_once(
                f"this checkpoint was trained for {trained} latent frames and will make {framing.latent_frames}: "
                "expect drift or flicker beyond; a preset made for long rollouts does better"
            )
        output = config.output or Path("outputs") / f"{config.runner_name}.mp4"
        device = resolve_device(config.device)
        return Plan(pipeline, prompt, seed, framing, fps, device, output, control, embeds, loras)

    def run(self) -> Path:
        """Make the video; returns its path. Whatever was generated when an error or a signal comes is kept."""
        plan = self.plan()
        framing = plan.framing
        if self.config.seed is None:
            print(f"seed {plan.seed}", file=sys.stderr)
        metrics = RunMetrics()
        try:
            writer = VideoWriter(plan.output, plan.fps, framing.height, framing.width)
        except MediaError as error:
            raise UserError(str(error)) from None
        interrupted = True
        pipeline = None
        sheet = FrameSample(24) if self.config.preview else None
        try:
            with terminate_as_interrupt(), writer:
                begun = time.perf_counter()
                pipeline = self._load(plan)
                metrics.load = time.perf_counter() - begun
                metrics.start()
                with pipeline.rollout(
                    plan.prompt, seed=plan.seed, negative_prompt=self.config.negative_prompt,
                    num_chunk=framing.num_chunk if framing.num_frames is None else None, num_frames=framing.num_frames,
                    image=framing.image, last_image=framing.last_image, clip=framing.clip, control=plan.control,
                    height=framing.height, width=framing.width,
                ) as rollout:  # fmt: skip
                    self._generate(rollout, plan, writer, metrics, sheet)
            interrupted = False
        finally:
            metrics.stop()
            if metrics.frames:
                self._finish(plan, metrics, pipeline, sheet, interrupted)
        return plan.output

    def _load(self, plan: Plan) -> Any:
        try:
            pipeline = plan.pipeline.setup(device=plan.device, text_encoder=self._prompts(plan))
            load_loras(pipeline, plan.loras)
            return pipeline
        except (CheckpointError, ConfigError) as error:
            raise UserError(str(error)) from None

    def _prompts(self, plan: Plan) -> PromptEncoder | GivenPrompts:
        """What knows the embeddings of the run's prompts; a text encoder that is not to stay is gone again."""
        text_encoder, path = plan.pipeline.text_encoder, self.config.save_embeds
        if text_encoder is None:
            prompts = GivenPrompts(plan.embeds or {}, plan.prompt, plan.device)
        else:
            prompts = PromptEncoder(text_encoder, plan.device)
        if path is not None or (text_encoder is not None and text_encoder.residence != "device"):
            negative = plan.pipeline.diffusion_model.negative_prompt(self.config.negative_prompt)
            slots = prompts.slots([plan.prompt], negative)
            try:
                if path is not None:
                    save_embeds(path, **slots)
            except OSError as error:
                raise UserError(f"--save-embeds {path} cannot be written: {error.strerror or error}") from None
        return prompts

    def _generate(
        self, rollout: Rollout, plan: Plan, writer: VideoWriter, metrics: RunMetrics, sheet: FrameSample | None
    ) -> None:
        with tqdm(total=plan.framing.num_chunk, unit="chunk", desc=self.config.runner_name, disable=None) as bar:
            for chunk in rollout:
                check_chunk(
                    chunk,
                    plan.pipeline.diffusion_model.transformer.dtype,
                    may_be_constant=plan.framing.begins_with_given,
                )
                frames = chunk.frames.numpy()
                writer.write(frames)
                metrics.add(chunk, len(frames))
                if sheet is not None:
                    sheet.add(frames)
                bar.update()
                bar.set_postfix_str(f"{metrics.fps:.1f} FPS, first frame {metrics.first_frame:.2f} s", refresh=False)

    def _finish(
        self, plan: Plan, metrics: RunMetrics, pipeline: Any, sheet: FrameSample | None, interrupted: bool
    ) -> None:
        height, width = plan.framing.height, plan.framing.width
        config = replace(self.config, seed=plan.seed, fps=str(plan.fps))
        config = replace(config, save_embeds=None)  # a replay is not to write it again
        if not plan.framing.sized_by_image:
            config = replace(config, height=height, width=width)
        output = {
            "file": plan.output.name,
            "frames": metrics.frames,
            "fps": str(plan.fps),
            "height": height,
            "width": width,
            "guidance_scale": plan.pipeline.diffusion_model.transformer.guidance_scale,
            "interrupted": interrupted,
        }
        write_record(
            plan.output.with_suffix(".json"), config, pipeline, seed=plan.seed, device=plan.device,
            timings=metrics.summary(), output=output,
        )  # fmt: skip
        if sheet is not None:
            contact_sheet(sheet.frames(), plan.output.with_suffix(".png"))
        print(metrics.lines(), file=sys.stderr)
        print(f"{plan.output}  {metrics.frames} frames, {width}x{height}, {plan.fps} fps")

    def _prompt(self) -> str:
        config = self.config
        prompt = config.prompt
        if config.prompt_file is not None:
            prompt = self._read(config.prompt_file, "--prompt-file").strip()
        for name, text in (("prompt", prompt), ("negative prompt", config.negative_prompt or "")):
            if len(text) > MAX_PROMPT:
                raise UserError(f"the {name} has {len(text)} characters; at most {MAX_PROMPT} are taken: shorten it")
        if not prompt.strip() and config.prompt_embeds is None:
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
        base = config.pipeline
        if config.ckpt_path is not None:
            own = base.diffusion_model.transformer
            declared = dict.fromkeys(filter(None, (own.state_dict_transform, *own.transforms)))
            changes |= {
                "state_dict_transform": config.ckpt_transform,
                "transforms": tuple(declared),
            }
            if isinstance(parse_source(config.ckpt_path), RandomSource):
                base = with_checkpoints_from(base, config.ckpt_path)
                say_once(f"every part of the model takes its weights from {config.ckpt_path}, so the video is noise")
        elif config.ckpt_transform is not None:
            raise UserError("--ckpt-transform renames the keys of --ckpt-path, which is not given")
        scheduler: Any = {} if config.num_steps is None else {"num_steps": config.num_steps}
        if config.solver is not None:
            scheduler = derive_config(with_solver(base.diffusion_model.scheduler, config.solver), **scheduler)
        low, *high = self._checkpoints_of_experts(base)
        experts = tuple(
            derive_config(expert, transformer=changes | path)
            for expert, path in zip(base.diffusion_model.high_noise, high, strict=True)
        )
        pipeline = derive_config(
            base, diffusion_model={"transformer": changes | low, "scheduler": scheduler, "high_noise": experts}
        )
        pipeline.validate_tree()
        return pipeline

    def _checkpoints_of_experts(self, base: PipelineConfig) -> list[dict[str, str]]:
        """What --ckpt-path says of each transformer: as many, separated by commas, that of the lowest noise first."""
        count, path = 1 + len(base.diffusion_model.high_noise), self.config.ckpt_path
        if path is None:
            return [{}] * count
        single = count == 1 or isinstance(parse_source(path), RandomSource)
        parts = [path] * count if single else path.split(",")
        if len(parts) != count:
            raise UserError(
                f"{self.config.runner_name} has {count} transformers, and --ckpt-path names {len(parts)}; "
                "give as many, separated by commas, that of the lowest noise first"
            )
        return [{"checkpoint_path": part} for part in parts]


def _checkpoints(config: Any) -> list[str]:
    """Every checkpoint that stands in a config tree."""
    from flashdreams.config import nested_configs

    own = getattr(config, "checkpoint_path", None)
    return ([own] if own else []) + [path for child in nested_configs(config) for path in _checkpoints(child)]

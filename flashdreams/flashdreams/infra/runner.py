"""One run of the command line: check everything, generate chunk by chunk, write the video as it grows."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.checkpoint import CheckpointError, open_checkpoint, parse_source
from flashdreams.core.checkpoint.sources import RandomSource
from flashdreams.core.controls import ControlError
from flashdreams.core.controls.recording import SUFFIX
from flashdreams.core.media import MediaError
from flashdreams.core.media.fps import parse_fps
from flashdreams.core.media.output import check_output, remove_folders
from flashdreams.core.media.sheet import contact_sheet
from flashdreams.core.media.video import VideoWriter
from flashdreams.core.noise import check_seed
from flashdreams.core.notices import say_once
from flashdreams.infra.chunk import Chunk, hand_over
from flashdreams.infra.config import PipelineConfig, RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.examples import with_example_data
from flashdreams.infra.framing import Framing, frame_run
from flashdreams.infra.health import check_chunk
from flashdreams.infra.load import accelerate, checkpoints_of, compile_ahead, resolve_device, with_checkpoints_from
from flashdreams.infra.lora_flag import LoraChoice, check_loras, load_loras, parse_loras
from flashdreams.infra.metrics import RunMetrics
from flashdreams.infra.number_formats import say_slow_formats
from flashdreams.infra.output import FrameOutput
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.postprocess import UNCHANGED, ChainConfig
from flashdreams.infra.postprocess.flag import postprocessors
from flashdreams.infra.preview import FrameSample
from flashdreams.infra.prompts import GivenPrompts, PromptEncoder, load_embeds, save_embeds
from flashdreams.infra.record import write_record
from flashdreams.infra.rollout import Rollout
from flashdreams.infra.scheduler.config import with_solver
from flashdreams.infra.signals import interrupt_later, terminate_as_interrupt

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
    control: Sequence[Any] | None = None
    embeds: dict[str, torch.Tensor] | None = None
    """Embeddings in place of a text encoder, which ``pipeline`` then lacks."""
    loras: tuple[LoraChoice, ...] = ()
    postprocess: ChainConfig = UNCHANGED

    @property
    def file_size(self) -> tuple[int, int]:
        """Height and width of the file."""
        return self.postprocess.output_size(self.framing.height, self.framing.width)


class Runner:
    """Runs one slug as its config says."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = with_example_data(config)

    @property
    def output(self) -> Path:
        """The file to write."""
        return self.config.output or Path("outputs") / f"{self.config.runner_name}.mp4"

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
        postprocess = postprocessors(config.postprocess)
        fps = self._fps(pipeline)
        framing = self._framing(pipeline, fps, postprocess)
        control = self._controls(pipeline, framing)
        embeds = None
        if not pipeline.diffusion_model.transformer.takes_text:
            self._takes_no_text(prompt)
        elif config.prompt_embeds is not None:
            embeds = load_embeds(config.prompt_embeds, pipeline)
            pipeline = derive_config(pipeline, text_encoder=None)
            say_once(f"the embeddings in {config.prompt_embeds} are used; the prompt is recorded and not encoded")
        elif pipeline.text_encoder is None:
            raise UserError(f"{config.runner_name} has no text encoder; give saved embeddings (--prompt-embeds FILE)")
        else:
            pipeline.text_encoder.identity()
        for source in (*checkpoints_of(pipeline), *checkpoints_of(postprocess)):
            open_checkpoint(source)
        loras = parse_loras(config.lora)
        check_loras(pipeline, loras)
        trained = pipeline.diffusion_model.transformer.trained_frames
        if trained is not None and framing.latent_frames > trained:
            say_once(
                f"this checkpoint was trained for {trained} latent frames and will make {framing.latent_frames}: "
                "expect drift or flicker beyond; a preset made for long rollouts does better"
            )
        device = resolve_device(config.device)
        return Plan(pipeline, prompt, seed, framing, fps, device, self.output, control, embeds, loras, postprocess)

    def _fps(self, pipeline: PipelineConfig) -> Fraction:
        """Rate of the frames that the model makes."""
        given = self.config.fps
        return Fraction(pipeline.fps).limit_denominator(1001) if given is None else parse_fps(given)

    def _framing(self, pipeline: PipelineConfig, fps: Fraction, postprocess: ChainConfig) -> Framing:
        return frame_run(self.config, pipeline, fps, postprocess)

    def run(self) -> Path:
        """Make the video; returns its path. Whatever was generated when an error or a signal comes is kept."""
        plan = self.plan()
        if self.config.seed is None:
            print(f"seed {plan.seed}", file=sys.stderr)
        metrics = RunMetrics()
        try:
            writer = VideoWriter(plan.output, plan.postprocess.output_fps(plan.fps), *plan.file_size)
        except MediaError as error:
            raise UserError(str(error)) from None
        interrupted = True
        pipeline = postprocessor = output = None
        sheet = FrameSample(24) if self.config.preview else None
        try:
            with terminate_as_interrupt(), writer:
                begun = time.perf_counter()
                pipeline, postprocessor = self._load(plan)
                metrics.load = time.perf_counter() - begun
                if self.config.acceleration.prewarm:
                    pipeline.acceleration.prewarm(pipeline, lambda: self._rollout(pipeline, plan))
                size = plan.framing.height, plan.framing.width
                output = FrameOutput(writer, postprocessor, size, plan.fps, plan.seed, sheet)
                metrics.start()
                with output, closing(self._chunks(pipeline, plan)) as chunks:
                    behind = pipeline.decode_lane is not None
                    self._generate(chunks, plan, output, metrics, behind=behind)
            interrupted = False
        finally:
            metrics.stop()
            if output is not None and plan.postprocess.stages:
                metrics.postprocess = output.seconds
            if writer.num_frames:
                self._finish(plan, writer, interrupted, metrics, sheet, pipeline, postprocessor)
        return plan.output

    def warm_up(self) -> Any:
        """Compile for the shapes of such a run, however long, and keep that for later starts; makes no video. Returns
        the pipeline."""
        plan = self.plan()
        if plan.framing.num_frames is None and not plan.framing.from_video:
            plan = replace(plan, framing=replace(plan.framing, num_chunk=sys.maxsize))
        pipeline, _ = self._load(plan)
        try:
            pipeline.acceleration.prewarm(pipeline, lambda: self._rollout(pipeline, plan))
        except ControlError as error:
            raise UserError(str(error)) from None
        return pipeline

    def _load(self, plan: Plan) -> tuple[Any, Any]:
        say_slow_formats(plan.pipeline, plan.device)
        try:
            home = self.config.acceleration.home
            with self._compile_ahead(plan) as ahead:
                pipeline = plan.pipeline.setup(device=plan.device, text_encoder=self._prompts(plan), home=home)
                load_loras(pipeline, plan.loras)
                accelerate(pipeline, self.config.acceleration, ahead)
            return pipeline, plan.postprocess.setup(device=plan.device)
        except (CheckpointError, ConfigError) as error:
            raise UserError(str(error)) from None

    def _compile_ahead(self, plan: Plan) -> AbstractContextManager[Any]:
        framing = plan.framing
        if plan.pipeline.image_use != "concat" and framing.begins_with_given:
            return nullcontext()  # a context that begins with given frames has other shapes
        return compile_ahead(
            plan.pipeline, self.config.acceleration, plan.device, height=framing.height, width=framing.width,
            num_frames=framing.num_frames,
        )  # fmt: skip

    def _takes_no_text(self, prompt: str) -> None:
        """Refuse what only means something to a model that takes text."""
        config = self.config
        flags = {
            "--prompt": prompt, "--negative-prompt": config.negative_prompt, "--prompt-embeds": config.prompt_embeds,
            "--save-embeds": config.save_embeds,
        }  # fmt: skip
        if given := [flag for flag, value in flags.items() if value]:
            raise UserError(f"{config.runner_name} takes no prompt; leave {' and '.join(given)} out")

    def _prompts(self, plan: Plan) -> PromptEncoder | GivenPrompts | None:
        """What knows the embeddings of the run's prompts; a text encoder that is not to stay is gone again."""
        if not plan.pipeline.diffusion_model.transformer.takes_text:
            return None
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

    def _rollout(self, pipeline: StreamInferencePipeline, plan: Plan, save_control: Path | None = None) -> Rollout:
        framing = plan.framing
        return pipeline.rollout(
            plan.prompt, seed=plan.seed, negative_prompt=self.config.negative_prompt,
            num_chunk=framing.num_chunk if framing.num_frames is None else None, num_frames=framing.num_frames,
            image=framing.image, last_image=framing.last_image, clip=framing.clip, control=plan.control,
            save_control=save_control, height=framing.height, width=framing.width,
        )  # fmt: skip

    def _chunks(self, pipeline: Any, plan: Plan) -> Generator[Chunk]:
        """What the model makes."""
        try:
            with self._rollout(pipeline, plan, save_control=self.config.save_control) as rollout:
                yield from rollout
        except ControlError as error:
            raise UserError(str(error)) from None

    def _generate(
        self, chunks: Iterable[Chunk], plan: Plan, output: FrameOutput, metrics: RunMetrics, *, behind: bool
    ) -> None:
        dtype, may_be_constant = plan.pipeline.diffusion_model.transformer.dtype, plan.framing.begins_with_given
        with tqdm(total=plan.framing.num_chunk, unit="chunk", desc=self.config.runner_name, disable=None) as bar:

            def write(chunk: Chunk) -> None:
                check_chunk(chunk, dtype, may_be_constant=may_be_constant)
                with interrupt_later():
                    output.add(chunk.frames)
                    metrics.add(chunk, written=output.written)
                bar.update()
                first = "" if metrics.first_frame is None else f", first frame {metrics.first_frame:.2f} s"
                bar.set_postfix_str(f"{metrics.fps:.1f} FPS{first}", refresh=False)

            hand_over(chunks, write, behind=behind)

    def _finish(
        self, plan: Plan, writer: VideoWriter, interrupted: bool, metrics: RunMetrics, sheet: FrameSample | None,
        pipeline: Any, postprocessor: Any,
    ) -> None:  # fmt: skip
        """What is done once the file is complete, or as complete as it will be."""
        pipeline.acceleration.finish()
        height, width = plan.file_size
        output = {
            "file": plan.output.name,
            "frames": writer.num_frames,
            "fps": str(writer.fps),
            "height": height,
            "width": width,
            "guidance_scale": plan.pipeline.diffusion_model.transformer.guidance_scale,
            "interrupted": interrupted,
        }
        write_record(
            plan.output.with_suffix(".json"), self._as_run(plan), pipeline, postprocessor, seed=plan.seed,
            device=plan.device, timings=metrics.summary(), output=output,
        )  # fmt: skip
        if sheet is not None:
            contact_sheet(sheet.frames(), plan.output.with_suffix(".png"))
        print(metrics.lines(), file=sys.stderr)
        print(f"{plan.output}  {writer.num_frames} frames, {width}x{height}, {writer.fps} fps")

    def _as_run(self, plan: Plan) -> RunnerConfig:
        """The config that makes the same video again."""
        config = replace(self.config, seed=plan.seed, fps=str(plan.fps))
        config = replace(config, save_embeds=None, save_control=None)  # a replay is not to write them again
        if plan.framing.sized_by_image:
            return config
        return replace(config, height=plan.framing.height, width=plan.framing.width)

    def _prompt(self) -> str:
        config = self.config
        prompt = config.prompt
        if config.prompt_file is not None:
            prompt = self._read(config.prompt_file, "--prompt-file").strip()
        for name, text in (("prompt", prompt), ("negative prompt", config.negative_prompt or "")):
            if len(text) > MAX_PROMPT:
                raise UserError(f"the {name} has {len(text)} characters; at most {MAX_PROMPT} are taken: shorten it")
        takes_text = config.pipeline.diffusion_model.transformer.takes_text
        if takes_text and not prompt.strip() and config.prompt_embeds is None:
            raise UserError("the prompt is empty; say in a few words what the video shows (--prompt)")
        return prompt

    def _controls(self, pipeline: PipelineConfig, framing: Framing) -> Sequence[Any] | None:
        """One control per frame of the run, if any are given."""
        source, save = self.config.control_source(), self.config.save_control
        if pipeline.encoder is None or not pipeline.encoder.takes:
            if source is not None or save is not None:
                flag = "--control" if source is not None else "--save-control"
                raise UserError(f"{self.config.runner_name} takes no controls; leave {flag} out")
            return None
        if save is not None and pipeline.encoder.takes.pixels:
            raise UserError(
                f"{self.config.runner_name} is controlled by a video; keep it, and leave --save-control out"
            )
        if save is not None:
            remove_folders(check_output(save, SUFFIX))
        if save is not None and source is not None and save.resolve() == Path(source).resolve():
            raise UserError(f"--save-control {save} would overwrite the controls it reads; give another name")
        if source is None:
            return None
        return pipeline.encoder.parse_controls(source, framing.num_frames or pipeline.frames_of(framing.latent_frames))

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

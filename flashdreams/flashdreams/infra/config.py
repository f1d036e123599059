"""Configs of the contracts in this package. Torch-free; families subclass these in their own config modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from flashdreams.config import ConfigError, InstantiateConfig
from flashdreams.core.controls import ControlSpec, read_controls
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.layout import ChunkPlan

if TYPE_CHECKING:
    from flashdreams.infra.decoder import StreamingDecoder
    from flashdreams.infra.diffusion_model import DiffusionModel
    from flashdreams.infra.pipeline import StreamInferencePipeline
    from flashdreams.infra.runner import Runner
    from flashdreams.infra.scheduler.samplers import Scheduler
    from flashdreams.infra.transformer import Transformer

T = TypeVar("T")
DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(InstantiateConfig[T]):
    """A module with weights of its own."""

    dtype: DType = "float32"
    checkpoint_path: str | None = None
    """A file or folder of weights, ``org/repo``, ``hf://org/repo[/path][@revision]``, a link to a file on the hub,
    ``random:SEED``, or ``package://<package>/<file>`` for a file inside a Python package; ``#name`` at its end picks a
    state dict of a training dump. ``None`` leaves the module at its random initialisation (tests, training)."""
    state_dict_transform: str | None = field(default=None, metadata={"names_code": True})
    """``"module:function"`` that maps the checkpoint's state dict to the module's own keys."""
    transforms: tuple[str, ...] = field(default=(), metadata={"names_code": True})
    """Further such functions, of the layouts in which weights for this module are published. Where no transform is
    named, the one of these that fits a checkpoint's header is taken; keys that fit as they are need none."""
    allow_missing: tuple[str, ...] = ()
    """Exact keys that a checkpoint may lack (zero-initialised new heads only)."""

    def setup(self, *, device: str = "cpu") -> T:
        """Build the module on ``device`` in ``dtype``, with its checkpoint if one is named; ready for inference."""
        from flashdreams.infra.loading import setup_module

        self.validate_tree()
        return setup_module(self, device)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModuleConfig[T]):
    """A one-shot or streaming encoder."""

    lookahead: ClassVar[int] = 0
    """Pixel frames after a chunk's own whose controls a streaming encoder reads with it."""

    @property
    def takes(self) -> ControlSpec:
        """Which controls a streaming encoder understands."""
        return ControlSpec()

    def parse_controls(self, source: str, frames: int) -> Sequence[Any]:
        """What a person gives for a run of ``frames`` pixel frames, as one control per frame.

        Args:
            source: words and keys, such as ``"w:24 w+d:8 none:16"``; or the path of a file of them, or of a recording
                (:mod:`flashdreams.core.controls.recording`). Models that read files of their own add them here.

        Raises:
            ValueError: with what is not understood, and what would be.
        """
        return read_controls(source, self.takes)


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(EncoderConfig[T]):
    """A one-shot encoder of prompts, and where it lives."""

    residence: Literal["device", "cpu", "transient"] = "device"
    """device: beside the transformer. cpu: in the CPU's memory, where it runs too. transient: loaded for a prompt that
    is new, and freed before the transformer needs the memory."""
    cache_embeddings: bool = False
    """Keep embeddings on disk, so that a prompt that was used before needs no text encoder."""

    @property
    def suggestions(self) -> tuple[str, ...]:
        """Prompts to try, for pages."""
        return ()

    def identity(self) -> tuple[str, ...]:
        """What embeddings depend on besides these fields and the weights: digests of further files, such as versions.

        Raises:
            CheckpointError: one is missing, so that no prompt can be encoded.
        """
        return ()


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModuleConfig["StreamingDecoder"]):
    """A streaming latent-to-pixel decoder. Latent frame 0 is one pixel frame, each later one several (causal)."""

    spatial_compression: ClassVar[int] = 8
    temporal_compression: ClassVar[int] = 4

    def frames(self, start: int, stop: int) -> int:
        """Pixel frames that latent frames ``start..stop-1`` of a stream decode to."""
        return self.temporal_compression * (stop - start) - (self.temporal_compression - 1) * (start == 0 < stop)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(InstantiateConfig["Scheduler"]):
    """A sampler: its sigma table and its transition kernel."""

    num_steps: int = 4

    def validate(self) -> None:
        if not 1 <= self.num_steps <= 1000:
            raise ConfigError(f"num_steps is {self.num_steps}; expected 1 to 1000")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModuleConfig["Transformer"]):
    """What every autoregressive transformer has, under the same names in every family."""

    network: InstantiateConfig
    len_t: int = 3
    """Latent frames per chunk."""
    first_len_t: int | None = None
    """Latent frames of chunk 0; ``None`` means ``len_t``."""
    window_size_t: int | None = None
    """Visible latent frames, the current chunk included; ``None``: the whole clip, as one chunk."""
    sink_size_t: int = 0
    """Latent frames at the start that never leave the window."""
    rope: Literal["absolute", "cache_relative"] = "absolute"
    context_noise: float = 0.0
    """Sigma told to the network when a clean chunk is committed; no noise is added."""
    guidance_scale: float = 1.0
    """Classifier-free guidance: 1 is conditional only, 0 unconditional only."""
    cfg: Literal["batched", "sequential"] = "batched"
    negative_prompt: str = ""
    """The model's published negative prompt, used when the user gives none."""
    stamp_image_latent: bool = False
    """Given first frames stand in the sample itself at every step, at timestep 0 (Wan2.2 TI2V)."""
    concat_image_mask_to_latent: bool = False
    """Given frames are further channels of the input: a mask of which are given, and the latents of a clip that is
    empty elsewhere (Wan I2V). With neither, given first frames are committed as context."""
    max_given_frames: int = 1
    """Latent frames that may stand in the sample (``stamp_image_latent``): 1 of a picture, more of a clip's end."""
    takes_last_image: bool = False
    """Whether the clip's last frame is given beside the first."""
    prompt_policy: Literal["keep", "recache", "reset"] = "keep"
    """What a new prompt does to the context unless said otherwise; see ``Rollout.set_prompt``."""
    recache_sink: bool = True
    """Whether a recache renews the sink too."""
    trained_frames: int | None = None
    """Longest rollout, in latent frames, that the checkpoint was trained for; ``None``: made to go on without end."""

    @property
    def spatial_patch(self) -> int:
        """Latent rows and columns that make one token."""
        return 1

    @property
    def text_shape(self) -> tuple[int | None, int | None]:
        """Most tokens, and width, of the text embeddings that the network takes, where its config says so."""
        return getattr(self.network, "text_len", None), getattr(self.network, "text_dim", None)

    @property
    def takes_text(self) -> bool:
        """Whether a prompt means anything to this model."""
        return True

    @property
    def bidirectional(self) -> bool:
        """Whether the whole clip is a single chunk, of any length."""
        return self.window_size_t is None

    def validate(self) -> None:
        if self.stamp_image_latent and self.concat_image_mask_to_latent:
            raise ConfigError("stamp_image_latent and concat_image_mask_to_latent are two ways for one thing; set one")
        first = self.len_t if self.first_len_t is None else self.first_len_t
        if self.len_t < 1 or first < 1:
            raise ConfigError(f"len_t={self.len_t}, first_len_t={self.first_len_t}; both must be at least 1")
        if self.max_given_frames < 1:
            raise ConfigError(f"max_given_frames is {self.max_given_frames}; expected 1 or more")
        if self.sink_size_t < 0:
            raise ConfigError(f"sink_size_t is {self.sink_size_t}; expected 0 or more")
        if self.window_size_t is not None and self.window_size_t - self.sink_size_t < max(self.len_t, first):
            raise ConfigError(
                f"window_size_t={self.window_size_t} with sink_size_t={self.sink_size_t} leaves "
                f"{self.window_size_t - self.sink_size_t} latent frames for the ring, fewer than one chunk "
                f"({max(self.len_t, first)}); raise window_size_t or lower sink_size_t"
            )
        if not math.isfinite(self.guidance_scale) or self.guidance_scale < 0:
            raise ConfigError(f"guidance_scale is {self.guidance_scale}; expected a finite number of 0 or more")
        if not 0 <= self.context_noise <= 1:
            raise ConfigError(f"context_noise is {self.context_noise}; expected a sigma in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(InstantiateConfig):
    """A transformer that is used for noise levels of ``sigma_low`` and above."""

    sigma_low: float
    transformer: TransformerConfig

    def validate(self) -> None:
        if not 0 < self.sigma_low < 1:
            raise ConfigError(f"sigma_low is {self.sigma_low}; expected a boundary between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class DiffusionModelConfig(InstantiateConfig["DiffusionModel"]):
    """A transformer, the scheduler that drives it, and further experts for high noise (usually none)."""

    _target: ClassVar[str] = "flashdreams.infra.diffusion_model:DiffusionModel"
    transformer: TransformerConfig
    scheduler: SchedulerConfig
    high_noise: tuple[ExpertConfig, ...] = ()
    """Each takes over from its ``sigma_low`` upwards; ``transformer`` has what is left."""
    swap_experts: bool = False
    """Keep only the expert in use on the device and the others in the CPU's memory. For bidirectional models, which
    change once in a clip; a streaming one commits every chunk to every expert."""
    fused_commit: bool = False
    """Commit a chunk in one pass with the first step of the next one. Equal; worth it where passes over little take as
    long as passes over twice as much."""

    def negative_prompt(self, given: str | None) -> str | None:
        """``given``, else the model's published one; ``None`` where no transformer is guided and none is needed."""
        transformers = [self.transformer, *(expert.transformer for expert in self.high_noise)]
        if all(transformer.guidance_scale == 1 for transformer in transformers):
            return None
        return self.transformer.negative_prompt if given is None else given


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(InstantiateConfig["StreamInferencePipeline"]):
    """A whole model: encoders, diffusion model, decoder, and the sizes it is made for."""

    _target: ClassVar[str] = "flashdreams.infra.pipeline:StreamInferencePipeline"
    name: str
    diffusion_model: DiffusionModelConfig
    decoder: DecoderConfig | None = None
    encoder: EncoderConfig | None = None
    """Per-chunk controls (actions, camera, ...)."""
    text_encoder: TextEncoderConfig | None = None
    image_encoder: EncoderConfig | None = None
    """Tokens of given images (CLIP), for models that attend to them."""
    image_size: Literal["fixed", "area", "cells"] = "fixed"
    """Size of a run from an image, unless said otherwise. ``fixed``: the model's. ``area``: the image's shape at the
    model's number of pixels (Wan I2V). ``cells``: likewise, by the rule of Wan2.2 TI2V."""
    height: int = 480
    width: int = 832
    fps: float = 16.0

    def validate(self) -> None:
        for name in ("height", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a positive number of pixels")
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise ConfigError(f"fps is {self.fps}; expected a finite number above 0")

    @property
    def size_multiple(self) -> int:
        """What height and width must be divisible by: codec compression times patch size."""
        compression = self.decoder.spatial_compression if self.decoder else 1
        return compression * self.diffusion_model.transformer.spatial_patch

    @property
    def image_use(self) -> Literal["context", "stamp", "concat"]:
        """How given frames reach the transformer."""
        transformer = self.diffusion_model.transformer
        return (
            "stamp" if transformer.stamp_image_latent
            else "concat" if transformer.concat_image_mask_to_latent
            else "context"
        )  # fmt: skip

    def plan(self, given: int = 0, latent_frames: int | None = None) -> ChunkPlan:
        """The chunks of a rollout.

        Args:
            given: first latent frames that are supplied as context.
            latent_frames: length of the single chunk of a bidirectional model; its ``len_t`` by default.
        """
        transformer = self.diffusion_model.transformer
        if transformer.bidirectional and latent_frames is not None:
            return ChunkPlan(latent_frames, latent_frames)
        return ChunkPlan.of(transformer.len_t, transformer.first_len_t, given)

    def frames_until(self, num_chunk: int, given: int = 0) -> int:
        """Pixel frames of the first ``num_chunk`` chunks."""
        return self.frames_of(self.plan(given).frames_until(num_chunk))

    def frames_of(self, latent_frames: int) -> int:
        """Pixel frames that so many latent frames decode to."""
        return self.decoder.frames(0, latent_frames) if self.decoder else latent_frames

    def latent_frames(self, num_frames: int) -> int:
        """Fewest latent frames that decode to at least ``num_frames`` pixel frames."""
        step = self.decoder.temporal_compression if self.decoder else 1
        latent = max(1, num_frames // step)
        while self.frames_of(latent) < num_frames:
            latent += 1
        return latent


@dataclass(frozen=True, kw_only=True)
class RunnerConfig(InstantiateConfig["Runner"]):
    """One slug of the command line: a pipeline, and what a person says about one run of it."""

    _target: ClassVar[str] = "flashdreams.infra.runner:Runner"
    runner_name: str
    description: str
    prompt: str = ""
    """What the video shows."""
    negative_prompt: str | None = None
    """What it should not show. The model's published one if not given; needs a guidance scale other than 1."""
    prompt_file: Path | None = None
    """Read the prompt from this text file."""
    prompt_embeds: Path | None = None
    """Use these embeddings in place of a text encoder. As --save-embeds writes them; the prompt is only recorded."""
    save_embeds: Path | None = None
    """Write the embeddings of the prompts to this file."""
    image: Path | None = None
    """First frame of the video."""
    last_image: Path | None = None
    """Last frame, for models of what happens between two."""
    video: Path | None = None
    """Clip to go on from. Its last frames are the context the video begins with, and are part of it."""
    example_data: bool = False
    """Use pictures of the package where an image is needed."""
    control: str | None = None
    """Live controls, in words of the model or from a file. Such as "right:24 none:8", a file of that, or one that
    --save-control wrote."""
    save_control: Path | None = None
    """Write the controls to a file (.jsonl), for --control."""
    output: Path | None = None
    """The mp4 to write. outputs/<slug>.mp4 if not given. The run record goes beside it, under the same name (.json)."""
    num_chunk: int | None = None
    """Length in chunks."""
    num_frames: int | None = None
    """Length in frames (rounded up to whole chunks)."""
    duration: float | None = None
    """Length in seconds."""
    seed: int | None = None
    """Of the noise: 0 to 2**64 - 1, or drawn if not given. One that is drawn is printed, so that the run can be
    repeated."""
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    strict_size: bool = False
    """Refuse a size the model cannot make. Without it the nearest size that it can make is taken, and said."""
    fps: str | None = None
    """Frame rate, such as 24, 23.976 or 30000/1001."""
    num_steps: int | None = None
    """Denoising steps per chunk."""
    solver: Literal["unipc", "dpm++", "euler"] | None = None
    """Another solver. For models that were not distilled for a few steps; euler as in diffusers."""
    guidance_scale: float | None = None
    """1: prompt only; more: away from the negative prompt. At 0 the video follows the negative prompt alone."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:0, mps."""
    dtype: DType | None = None
    """Number format of the transformer."""
    ckpt_path: str | None = None
    """Weights of the transformer, instead of the model's own. A file (safetensors or PyTorch) or folder, org/repo,
    hf://org/repo[/path][@revision], or a link to a file on the hub. random:SEED is for every part. Text encoder,
    decoder and further experts then take theirs from it too, so that nothing is downloaded; the video is noise."""
    lora: tuple[str, ...] = ()
    """LoRAs, each SOURCE or SOURCE:WEIGHT. Such as style.safetensors:0.8, or any form of --ckpt-path. A model of
    several experts takes SOURCE:WEIGHT:EXPERT, where 0 is the expert of the highest noise."""
    ckpt_transform: str | None = field(default=None, metadata={"names_code": True})
    """module:function that renames the keys of --ckpt-path."""
    postprocess: tuple[str, ...] = ()
    """Work on the frames before they are written, in order. Such as lanczos-x2; `flashdreams list` has the names. --fps
    is the rate before it, --num-frames the length after it."""
    preview: bool = False
    """Also write a contact sheet (PNG) of the frames."""
    default_num_frames: int = 65
    """Length of a run that states none."""
    acceleration: AccelerationConfig = field(default_factory=AccelerationConfig)
    """How the model is run."""
    pipeline: PipelineConfig
    """The model itself."""

    def control_source(self) -> str | None:
        """What the pipeline's encoder makes controls of (``parse_controls``): --control, or a model's own flags."""
        return self.control

    def validate(self) -> None:
        if self.runner_name != self.pipeline.name:
            raise ConfigError(f"runner_name {self.runner_name!r} differs from pipeline.name {self.pipeline.name!r}")

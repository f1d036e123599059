"""Compile while the weights are still being read, so that a start takes the longer of the two, not both.

Compiled code depends on the kinds and shapes of modules and inputs, not on what the weights are. So a stand-in is
compiled, in a thread: the same model with two blocks, weights of zero, and requests that say nothing. What is compiled
is not run. Whatever fails here is compiled later, when it is needed, as if nothing had been tried.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from flashdreams.acceleration.apply import compile_and_keep, parts_to_compile, wanted
from flashdreams.acceleration.artifacts import Artifacts
from flashdreams.acceleration.blank import blank_conditions, blank_control, blank_layout
from flashdreams.acceleration.channels_last import channels_last
from flashdreams.acceleration.compile import Region
from flashdreams.acceleration.kv_dtype import store_kv_as
from flashdreams.acceleration.prewarm import prewarm
from flashdreams.config import ConfigError, derive_config
from flashdreams.core.checkpoint.sources import ZEROS
from flashdreams.core.notices import say_once
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.config import ModuleConfig, PipelineConfig
from flashdreams.infra.load import with_checkpoints_from
from flashdreams.infra.loading import build_on_meta, expert_configs
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.rollout import Rollout

LAYERS = 2
"""Blocks of the stand-in: the last one is committed in another way than those before it."""


class Ahead:
    """Compiles for rollouts of one size of ``stand_in``, from now on, in a thread.

    Args:
        chunks: of which the shapes are met; ``None``: all there are.
    """

    def __init__(
        self, stand_in: StreamInferencePipeline, config: AccelerationConfig, artifacts: Artifacts | None,
        size: tuple[int, int], num_frames: int | None, chunks: int | None,
    ) -> None:  # fmt: skip
        self.artifacts = artifacts
        self.entries = 0
        """Entries of compiled code of an earlier run that were taken up."""
        self.regions: list[Region] = []
        """What was compiled; complete after :meth:`wait`."""
        self._request: Any = {"height": size[0], "width": size[1], "num_frames": num_frames}
        self._decodes = wanted(config.compile_decoder, stand_in.device)
        self._threads = torch.get_num_threads()
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if stand_in.device.type == "cuda" else []
        self._abandoned = False
        arguments = stand_in, config, chunks
        self._thread = threading.Thread(target=self._compile, args=arguments, name="compile-ahead")
        self._thread.start()

    def abandon(self) -> None:
        """Begin no further compilation: the model is not to be had. The process ends when the present one is done."""
        self._abandoned = True
        for region in self.regions:
            region.broken = True

    def wait(self) -> None:
        """Until all is compiled. The global random state, which the compiler puts back to what it found, is then that
        of the beginning: reading weights does not change it."""
        self._thread.join()
        for region in self.regions:
            region.dry = False
        torch.set_rng_state(self._random[0])
        if self._random[1]:
            torch.cuda.set_rng_state_all(self._random[1])

    def _compile(self, stand_in: StreamInferencePipeline, config: AccelerationConfig, chunks: int | None) -> None:
        torch.set_num_threads(self._threads)  # a setting of each thread, which code is compiled for
        if stand_in.device.type == "cuda":
            torch.cuda.set_device(stand_in.device)
        try:
            if config.kv_dtype != "model":
                store_kv_as(stand_in.diffusion_model.experts, config.kv_dtype)
            if config.channels_last and stand_in.decoder is not None:
                channels_last(stand_in.decoder)
            self.regions, self.entries = compile_and_keep(parts_to_compile(stand_in, config), self.artifacts)
            if self._abandoned:
                return
            for region in self.regions:
                region.dry = True
            prewarm(stand_in, lambda: self._start(stand_in), chunks)
        except Exception as error:
            if any(region.broken for region in self.regions):  # which is said already, or nobody wants to know
                return
            self.regions = []
            say_once(f"nothing was compiled while the weights were read: {type(error).__name__}: {str(error)[:200]}")

    def _start(self, stand_in: StreamInferencePipeline) -> Rollout:
        config, request = stand_in.config, self._request
        layout = blank_layout(stand_in, **request)
        control = blank_control(config, layout)
        rollout = stand_in.rollout(
            conditions=blank_conditions(config, layout, stand_in.device),
            control=None if control is None else lambda start, stop: [[control] * (stop - start)],
            **request,
        )
        rollout.decodes = self._decodes
        return rollout


def begin(
    config: PipelineConfig,
    acceleration: AccelerationConfig,
    device: str,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
) -> Ahead | None:
    """Begin to compile for ``config``, of which the weights are about to be read, if anything is to be compiled.

    ``None`` too where modules are other ones once their weights are there (quantized, offloaded, swapped), or where
    weights are not read but drawn, from a random state that a compiler may not meddle with.
    """
    model = config.diffusion_model
    plain = acceleration.offload == "none" and acceleration.quantize == "none" and not model.swap_experts
    choices = acceleration.compile, acceleration.compile_decoder
    if not plain or not any(wanted(choice, torch.device(device)) for choice in choices):
        return None
    try:
        stand_in = _stand_in(config, device) if _reads_weights(config) else None
    except Exception:  # what is wrong shows, and is said, when the model itself is made
        return None
    if stand_in is None or not parts_to_compile(stand_in, acceleration):
        return None
    artifacts = Artifacts.of(config, stand_in.device) if acceleration.reuse_compiled else None
    size = height or config.height, width or config.width
    return Ahead(stand_in, acceleration, artifacts, size, num_frames, None if acceleration.prewarm else 1)


def _reads_weights(config: PipelineConfig) -> bool:
    parts: list[ModuleConfig | None] = [
        *expert_configs(config.diffusion_model), config.decoder, config.text_encoder, config.image_encoder
    ]  # fmt: skip
    if any(part is not None and part.checkpoint_path is None for part in parts):
        return False
    encoder = config.encoder
    drawn = encoder is not None and encoder.checkpoint_path is None
    return not drawn or not any(True for _ in build_on_meta(encoder).parameters())


def _stand_in(config: PipelineConfig, device: str) -> StreamInferencePipeline:
    config = replace(with_checkpoints_from(config, ZEROS), text_encoder=None, image_encoder=None)
    model = config.diffusion_model
    try:
        layers = lambda expert: {"network": {"num_layers": min(LAYERS, expert.network.num_layers)}}  # noqa: E731
        high = tuple(derive_config(e, transformer=layers(e.transformer)) for e in model.high_noise)
        small = derive_config(config, diffusion_model={"transformer": layers(model.transformer), "high_noise": high})
        small.validate_tree()
        config = small
    except (ConfigError, AttributeError):  # a network that is not of that form has all of its layers
        pass
    return config.setup(device=device)

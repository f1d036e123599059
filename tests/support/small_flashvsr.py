"""FlashVSR with every part of its structure in sizes that a test can afford, and random weights.

Importable by name, so that a test can register it: ``FLASHDREAMS_POSTPROCESSORS="small-flashvsr=small_flashvsr:ALL"``.
"""

from __future__ import annotations

from typing import Any

from flashdreams.config import derive_config
from flashdreams.infra.config import PipelineConfig, RunnerConfig
from flashvsr.config import RUNNER_FLASHVSR_X4, ColouredVAEConfig, PipelinePostprocessorConfig

NETWORK = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "text_dim": 8, "text_len": 6, "freq_dim": 16}


def shrunk(runner: RunnerConfig = RUNNER_FLASHVSR_X4, name: str | None = None, **network: Any) -> RunnerConfig:
    """The runner with a small network, projection and decoder; ``network`` sets further fields of the network."""
    transformer = {"dtype": "float32", "checkpoint_path": None, "network": NETWORK | {"sparse_ratio": 0.02} | network}
    decoder: dict[str, Any] = {"dtype": "float32", "checkpoint_path": None}
    if isinstance(runner.pipeline.decoder, ColouredVAEConfig):
        decoder |= {"dim": 4, "num_res_blocks": 1}
    else:
        decoder |= {"dims": (4, 4, 2, 2)}
    patch: dict[str, Any] = {
        "diffusion_model.transformer": transformer,
        "encoder": {"dtype": "float32", "checkpoint_path": None, "hidden_dims": (4, 8), "dim": 24},
        "text_encoder": {"dtype": "float32", "checkpoint_path": None, "text_len": 6, "text_dim": 8},
        "decoder": decoder,
        "name": name or runner.runner_name,
        "height": 128,
        "width": 256,
    }
    return derive_config(runner, pipeline=patch, runner_name=name or runner.runner_name)


def narrow() -> PipelineConfig:
    """With windows of 2x2x2 tokens, so that a picture of 64x96 has six of them; all in float64."""
    pipeline = shrunk(window=(2, 2, 2), local_range=3, sparse_ratio=0.0025).pipeline
    parts = {part: {"dtype": "float64"} for part in ("encoder", "text_encoder", "decoder")}
    parts |= {"diffusion_model": {"transformer": {"dtype": "float64"}}}
    return derive_config(pipeline, **parts, height=64, width=96)


RUNNER = shrunk(name="small-flashvsr")
ALL = {
    "small-flashvsr": PipelinePostprocessorConfig(
        name="small-flashvsr", description="A small random model", pipeline=RUNNER.pipeline
    )
}

"""What of a run is not what the model's makers published: named, with the error it made where it was measured."""

from __future__ import annotations

from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.config import PipelineConfig
from flashdreams.plugins.entry import PluginError
from flashdreams.plugins.registry import get_runner

MEASURED = {
    "quantize int8": "frames of tiny-world: 53 dB against the exact ones",
    "quantize int8-dynamic": "frames of tiny-world: 47 dB against the exact ones",
    "kv_dtype int8": "frames of tiny-world: 51 dB against the exact ones",
    "kv_dtype fp8": "frames of tiny-world: 42 dB against the exact ones",
    "num_steps": "frames of tiny-world in 2 steps: 20 dB against those in its 4, in 3 steps 30 dB",
}
"""Peak signal-to-noise ratio over eight chunks, by ``python tests/support/approximations.py``."""


def approximations(pipeline: PipelineConfig, config: AccelerationConfig) -> list[str]:
    """Every approximation in a run of ``pipeline`` under ``config``; none by default."""
    found = []
    for name, exact in (("quantize", "none"), ("kv_dtype", "model")):
        if (value := getattr(config, name)) != exact:
            found.append(_with_error(f"{name} {value}", f"{name} {value}"))
    steps, published = pipeline.diffusion_model.scheduler.num_steps, _published_steps(pipeline.name)
    if published is not None and steps != published:
        found.append(_with_error(f"{steps} denoising steps instead of {published}", "num_steps"))
    return found


def _published_steps(name: str) -> int | None:
    """Steps of the model of this name as it comes, if there is one."""
    try:
        return get_runner(name).pipeline.diffusion_model.scheduler.num_steps
    except PluginError:
        return None


def _with_error(text: str, key: str) -> str:
    return f"{text} ({MEASURED[key]})" if key in MEASURED else text

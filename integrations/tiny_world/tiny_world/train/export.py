"""Stage ``export``: the trained modules as float16 safetensors in the package, and their count."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from tiny_world.train.codec import TrainingCodec, load_codec
from tiny_world.train.dit import load_model
from tiny_world.train.packing import TrainingModel

FILES = {"codec": "codec.safetensors", "network": "network.safetensors", "text": "text_encoder.safetensors"}
LATEST = ("distill", "base")
"""Stages whose model may be exported, best first."""


def export(out: Path, weights: Path, stage: str | None = None) -> dict[str, int]:
    """Write the weights of ``stage`` (the last one that exists by default); returns parameters and bytes by name."""
    codec, model = TrainingCodec(), TrainingModel()
    tuned = out / "decoder.pt"
    load_codec(codec, tuned if tuned.exists() else out / "codec.pt")
    stage = stage or next((name for name in LATEST if (out / f"{name}.pt").exists()), "base")
    load_model(model, out / f"{stage}.pt")
    weights.mkdir(parents=True, exist_ok=True)
    states = {"codec": codec_state(codec), "network": model.network.state_dict(), "text": model.text.state_dict()}
    report = {}
    for name, state in states.items():
        path = weights / FILES[name]
        save_file({k: v.half().contiguous() for k, v in state.items()}, path, metadata={"format": "pt", "stage": stage})
        path.chmod(0o644)
        report[f"{name}_parameters"] = sum(v.numel() for v in state.values())
        report[f"{name}_bytes"] = path.stat().st_size
    return report


def codec_state(codec: TrainingCodec) -> dict[str, Tensor]:
    """Encoder and decoder, with the bottleneck's mean and variance folded into the encoder's head."""
    folded = nn.ModuleDict({"encoder": codec.encoder, "decoder": codec.decoder})
    state = {k: v.clone() for k, v in folded.state_dict().items()}
    scale = (codec.bottleneck.running_var + codec.bottleneck.eps).rsqrt()
    state["encoder.head.weight"] *= scale[:, None, None, None]
    state["encoder.head.bias"] = (state["encoder.head.bias"] - codec.bottleneck.running_mean) * scale
    return state

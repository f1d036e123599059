"""Stage ``export``: the trained modules as float16 safetensors in the package, and the way back."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tiny_world.train._loop import save
from tiny_world.train.codec import TrainingCodec, load_codec
from tiny_world.train.dit import load_model
from tiny_world.train.packing import TrainingModel

FILES = {"codec": "codec.safetensors", "network": "network.safetensors", "text": "text_encoder.safetensors"}
EXPORTABLE = ("base", "distill")


def export(out: Path, weights: Path, stage: str | None = None) -> dict[str, int]:
    """Write the weights of ``stage`` (by default the one written last); returns parameters and bytes by name."""
    codec, model = TrainingCodec(), TrainingModel()
    tuned = out / "decoder.pt"
    load_codec(codec, tuned if tuned.exists() else out / "codec.pt")
    written = [name for name in EXPORTABLE if (out / f"{name}.pt").exists()]
    stage = stage or max(written, key=lambda name: (out / f"{name}.pt").stat().st_mtime, default="base")
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
    mean, variance = codec.bottleneck.running_mean, codec.bottleneck.running_var
    assert mean is not None
    assert variance is not None
    scale = (variance + codec.bottleneck.eps).rsqrt()
    state["encoder.head.weight"] *= scale[:, None, None, None]
    state["encoder.head.bias"] = (state["encoder.head.bias"] - mean) * scale
    return state


def unpack(weights: Path, out: Path) -> None:
    """Give ``out`` the checkpoints that training goes on from, made of packaged weights; what is there already stays.

    Optimiser states are not packaged, so a stage warms up anew; the codec's statistics stay folded into its encoder.
    """
    states = {
        name: {k: v.float() for k, v in load_file(weights / file).items()} for name, file in FILES.items()
    }  # fmt: skip
    codec, model = TrainingCodec(), TrainingModel()
    for part in ("encoder", "decoder"):
        getattr(codec, part).load_state_dict(
            {k.removeprefix(f"{part}."): v for k, v in states["codec"].items() if k.startswith(f"{part}.")}
        )
    variance = codec.bottleneck.running_var
    assert variance is not None
    variance.fill_(1 - codec.bottleneck.eps)
    model.network.load_state_dict(states["network"])
    model.text.load_state_dict(states["text"])
    average = {k: v.detach().clone() for k, v in model.named_parameters()}
    checkpoints = {
        "codec.pt": {"model": codec.state_dict()},
        "base.pt": {"model": model.state_dict()},
        "base_resume.pt": {"model": model.state_dict(), "average": average, "step": 0, "seconds": 0.0},
    }
    for name, state in checkpoints.items():
        if not (out / name).exists():
            save(out / name, **state)

"""What the scripts in ``integrations/*/tests/parity_check`` share. Torch alone: the originals run in environments of
their own, which need not have flashdreams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

THRESHOLD = 0.02
"""Largest mean |d|/255 of decoded frames that passes. A first choice: no check has been run with it yet."""


def check_clone(repo: Path, commit: str) -> str:
    """The commit that the clone ``repo`` is at; a warning where it is another than the script was written for."""
    try:
        command = ["git", "-C", str(repo), "rev-parse", "HEAD"]
        head = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{repo} is no git clone ({error}); clone the original and give its folder with --repo")
    if not head.startswith(commit):
        print(f"{repo} is at {head[:10]}, this was written for {commit[:10]}: check what it calls", file=sys.stderr)
    return head


@contextmanager
def recorded(name: str, *, seeded: bool = False) -> Iterator[list[Tensor]]:
    """A list of what ``torch.<name>`` returns inside, in order, on the CPU; with ``seeded``, of what it returns to
    callers with a generator of their own."""
    drawn: list[Tensor] = []
    function = getattr(torch, name)

    def recording(*args: Any, **options: Any) -> Tensor:
        noise = function(*args, **options)
        if not seeded or options.get("generator") is not None:
            drawn.append(noise.detach().float().cpu())
        return noise

    setattr(torch, name, recording)
    try:
        yield drawn
    finally:
        setattr(torch, name, function)


def with_local_files(config: Any, folder: Path) -> Any:
    """``config`` with each ``hf://org/repo/file`` of its tree taken from ``folder/file``."""
    changes = {}
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        if is_dataclass(value):
            changes[name] = with_local_files(value, folder)
        elif isinstance(value, tuple) and any(is_dataclass(item) for item in value):
            changes[name] = tuple(with_local_files(item, folder) for item in value)
        elif name == "checkpoint_path" and value is not None and value.startswith("hf://"):
            changes[name] = str(folder.joinpath(*value.removeprefix("hf://").split("/")[2:]))
    return replace(config, **changes)


def merged_lora(base: Mapping[str, Tensor], lora: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``W + B A`` for every pair of a LoRA in PEFT's names whose alpha is its rank, written out, in float32."""
    out, used = dict(base), set()
    for key, down in lora.items():
        if ".lora_A." not in key:
            continue
        up = lora[key.replace(".lora_A.", ".lora_B.")]
        layer = key.partition(".lora_A.")[0].removeprefix("base_model.model.") + ".weight"
        target = next(name for name in base if name == layer or name.endswith(f"model.{layer}"))
        out[target] = (base[target].float() + up.float() @ down.float()).to(base[target].dtype)
        used.add(target)
    if 2 * len(used) != len(lora):
        sys.exit(f"the LoRA has {len(lora)} tensors, of which {2 * len(used)} were merged; expected all")
    return out


def run_causal_pipeline(
    repo: Path,
    config: str,
    state: Mapping[str, Tensor],
    *,
    prompt: str,
    frames: int,
    seed: int,
    initial: Tensor | None = None,
) -> dict[str, Tensor]:
    """Run ``pipeline/causal_inference.py`` of a repository of the Self-Forcing family.

    Args:
        repo: the clone, with ``wan_models/Wan2.1-T2V-1.3B`` in it, as its README says.
        config: its yaml file, from the clone's root.
        state: weights of the generator; wrappers of FSDP in the names are taken out.
        frames: latent frames to make.
        initial: latents ``[1, T, 16, h, w]`` to begin with.

    Returns:
        ``noise`` ``[1, T, 16, h, w]``, every draw as ``drawNNNN``, ``latents``, and ``frames`` uint8 ``[T, H, W, 3]``.
    """
    os.chdir(repo)
    sys.path.insert(0, os.getcwd())
    from omegaconf import OmegaConf
    from pipeline import CausalInferencePipeline

    settings = OmegaConf.load(config)
    if Path("configs/default_config.yaml").exists():
        settings = OmegaConf.merge(OmegaConf.load("configs/default_config.yaml"), settings)
    torch.set_grad_enabled(False)
    pipeline = CausalInferencePipeline(settings, device=torch.device("cuda"))
    plain = {key.replace("_fsdp_wrapped_module.", ""): value for key, value in state.items()}
    pipeline.generator.load_state_dict(plain)
    pipeline = pipeline.to(dtype=torch.bfloat16)
    for part in (pipeline.text_encoder, pipeline.generator, pipeline.vae):
        part.to("cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    noise = torch.randn(1, frames, 16, 60, 104, generator=generator, device="cuda", dtype=torch.bfloat16)
    more = {} if initial is None else {"initial_latent": initial.to("cuda", torch.bfloat16)}
    with recorded("randn_like") as drawn:
        video, latents = pipeline.inference(noise=noise, text_prompts=[prompt], return_latents=True, **more)
    report = {f"draw{i:04d}": draw.contiguous() for i, draw in enumerate(drawn)}
    report |= {"noise": noise.float().cpu(), "latents": latents.float().cpu().contiguous()}
    return report | {"frames": to_uint8(video[0].permute(1, 0, 2, 3) * 2 - 1)}


def save_reference(path: Path, tensors: dict[str, Tensor], **about: Any) -> None:
    """Keep what the original drew and made, and what it was asked for."""
    save_file(tensors, path, metadata={"about": json.dumps(about)})
    print(f"{path}: {tuple(tensors['frames'].shape)} frames, {sum('draw' in name for name in tensors)} draws")


def load_reference(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Both again."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["about"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def draws_by_step(draws: Sequence[Tensor], draws_in: Callable[[int], int], first: int = 0) -> dict[Any, Tensor]:
    """Re-noise draws of the original, ``[T, C, h, w]`` in order, by (chunk, step) and as ``[1, C, T, h, w]``.

    Args:
        draws_in: how many belong to a chunk.
        first: number of the first chunk that was made (the ones before it were given).
    """
    rest, chunk, found = list(draws), first, {}
    while rest:
        count = draws_in(chunk)
        if count < 1 or count > len(rest):
            sys.exit(f"{len(rest)} draws are left for chunk {chunk}, which needs {count}: the original drew otherwise")
        for step in range(count):
            found[chunk, step] = rest.pop(0).transpose(0, 1)[None]
        chunk += 1
    return found


def compare(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Differences of two videos, uint8 ``[T, H, W, 3]``, as parts of 255.

    Returns:
        ``mean``; ``worst_frame`` (mean of the frame that differs most) and its number; ``first_frame``, which no
        context has amplified; ``max``; ``equal``, the share of values that are the same.

    Raises:
        ValueError: they are not of one shape, or not uint8.
    """
    if ours.shape != theirs.shape or ours.dtype != torch.uint8 or theirs.dtype != torch.uint8 or ours.ndim != 4:
        raise ValueError(f"cannot compare {ours.dtype} {list(ours.shape)} with {theirs.dtype} {list(theirs.shape)}")
    difference = (ours.cpu().int() - theirs.cpu().int()).abs()
    by_frame = difference.double().flatten(1).mean(1) / 255
    return {
        "mean": by_frame.mean().item(),
        "worst_frame": by_frame.max().item(),
        "worst_frame_number": int(by_frame.argmax()),
        "first_frame": by_frame[0].item(),
        "max": difference.max().item() / 255,
        "equal": (difference == 0).double().mean().item(),
    }


def verdict(report: dict[str, float], threshold: float) -> int:
    """Print the report; the exit code, 1 above the threshold."""
    passed = report["mean"] <= threshold
    print(json.dumps(report, indent=2))
    print(f"{'PASS' if passed else 'FAIL'}: mean |d|/255 is {report['mean']:.5f}, threshold {threshold}")
    return 0 if passed else 1


def to_uint8(video: Tensor) -> Tensor:
    """``[3, T, H, W]`` in [-1, 1] to uint8 ``[T, H, W, 3]``, rounded as ours are."""
    levels = video.float().clamp(-1, 1).add(1).mul(127.5).round()
    return levels.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu()

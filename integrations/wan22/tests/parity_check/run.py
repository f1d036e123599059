"""The original beside ours on a GPU: the same prompt, images, weights and start noise, and how far frames differ.

    python run.py original --repo Wan2.2 --checkpoints Wan2.2-TI2V-5B --slug wan22-ti2v-5b --out ref.safetensors
    python run.py ours --checkpoints Wan2.2-TI2V-5B --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of ours. See README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

COMMIT = "42bf4cfaa384bc21833865abc2f9e6c0e67233dc"
"""Of github.com/Wan-Video/Wan2.2, which this was written for."""

THRESHOLD = 0.02
"""Largest mean |d|/255 that passes; the model card says why."""

# slug: task of the original, its class, width and height, frames, steps, shift, guidance (of the experts: low, high)
MODELS = {
    "wan22-ti2v-5b": ("ti2v-5B", "WanTI2V", (1280, 704), 121, 50, 5.0, 5.0),
    "wan22-t2v-a14b": ("t2v-A14B", "WanT2V", (1280, 720), 81, 40, 12.0, (3.0, 4.0)),
    "wan22-i2v-a14b": ("i2v-A14B", "WanI2V", (1280, 720), 81, 40, 5.0, (3.5, 3.5)),
}
SOLVERS = {"unipc": "unipc", "dpmpp": "dpm++"}
"""Ours and the original's names."""


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its noise and frames")
    first.add_argument("--repo", type=Path, required=True, help=f"clone of Wan-Video/Wan2.2 at {COMMIT[:8]}")
    first.add_argument("--checkpoints", type=Path, required=True, help="folder with the native repository's files")
    first.add_argument("--slug", choices=sorted(MODELS), required=True)
    first.add_argument("--prompt", default="A ginger cat walks along a garden wall at sunset")
    first.add_argument("--image", type=Path, help="first image: needed by i2v, possible for ti2v")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--steps", type=int, help="the model's own if not given")
    first.add_argument("--frames", type=int, help="4n + 1; the model's own if not given")
    first.add_argument("--solver", choices=sorted(SOLVERS), default="unipc")
    first.add_argument("--offload", action="store_true", help="let the original move parts to the CPU between uses")
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second = steps.add_parser("ours", help="run ours on the kept noise and compare")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--checkpoints", type=Path, required=True, help="the same folder")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of our transformer")
    second.add_argument("--threshold", type=float, default=THRESHOLD)
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run the original and write its start noise, its frames and what they were made from."""
    check_clone(arguments.repo)
    sys.path.insert(0, str(arguments.repo.resolve()))
    import wan  # ty: ignore[unresolved-import]
    from PIL import Image
    from wan.configs import WAN_CONFIGS  # ty: ignore[unresolved-import]

    task, kind, (width, height), frames, steps, shift, guidance = MODELS[arguments.slug]
    if arguments.image is None if kind == "WanI2V" else arguments.image is not None and kind == "WanT2V":
        sys.exit(f"{arguments.slug} {'needs' if kind == 'WanI2V' else 'takes no'} image (--image)")
    steps, frames = arguments.steps or steps, arguments.frames or frames
    config = WAN_CONFIGS[task]
    model = getattr(wan, kind)(config=config, checkpoint_dir=str(arguments.checkpoints), device_id=0, rank=0)
    where: dict[str, Any] = {"size": (width, height)} if kind != "WanI2V" else {"max_area": width * height}
    if arguments.image is not None:
        where |= {"img": Image.open(arguments.image).convert("RGB"), "max_area": width * height}
    with recorded_noise() as drawn:
        video = model.generate(
            arguments.prompt, frame_num=frames, shift=shift, sample_solver=SOLVERS[arguments.solver],
            sampling_steps=steps, guide_scale=guidance, seed=arguments.seed, offload_model=arguments.offload, **where,
        )  # fmt: skip
    if len(drawn) != 1:
        sys.exit(f"the original drew seeded noise {len(drawn)} times, expected once: is it at commit {COMMIT[:8]}?")
    about = {
        "slug": arguments.slug, "prompt": arguments.prompt, "steps": steps, "solver": arguments.solver,
        "image": None if arguments.image is None else str(arguments.image.resolve()),
    }  # fmt: skip
    save_file(
        {"noise": drawn[0].float().cpu().contiguous(), "frames": to_uint8(video)},
        arguments.out,
        metadata={"about": json.dumps(about)},
    )
    print(f"{arguments.out}: {tuple(video.shape)}")
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise
    from flashdreams.infra.runner import Runner
    from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig
    from wan22.config import WAN22_CONFIGS

    with safe_open(arguments.reference, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        noise, theirs = file.get_tensor("noise"), file.get_tensor("frames")
    image = None if about["image"] is None else Path(about["image"])
    runner = derive_config(
        with_local_files(WAN22_CONFIGS[about["slug"]], arguments.checkpoints),
        prompt=about["prompt"], num_frames=len(theirs), num_steps=about["steps"], device="cuda", image=image,
        pipeline={"diffusion_model": {"transformer": {"dtype": arguments.dtype}}},
    )  # fmt: skip
    for i in range(len(runner.pipeline.diffusion_model.high_noise)):
        path = f"pipeline.diffusion_model.high_noise.{i}.transformer.dtype"
        runner = derive_config(runner, {path: arguments.dtype})
    if about["solver"] == "dpmpp":
        shift = runner.pipeline.diffusion_model.scheduler.shift
        runner = derive_config(runner, pipeline={"diffusion_model": {"scheduler": DPMPPSchedulerConfig(shift=shift)}})
    plan = Runner(runner).plan()
    framing = plan.framing
    pipeline = plan.pipeline.setup(device=plan.device)
    (chunk,) = pipeline.rollout(
        about["prompt"], num_frames=framing.num_frames, image=framing.image,
        height=framing.height, width=framing.width, noise=GivenNoise(noise[None]),
    )  # fmt: skip
    report = compare(chunk.frames, theirs)
    passed = report["mean"] <= arguments.threshold
    print(json.dumps(report, indent=2))
    print(f"{'PASS' if passed else 'FAIL'}: mean |d|/255 is {report['mean']:.5f}, threshold {arguments.threshold}")
    return 0 if passed else 1


def compare(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Differences of two videos, uint8 ``[T, H, W, 3]``, as parts of 255.

    Returns:
        ``mean``; ``worst_frame`` (mean of the frame that differs most) and its number; ``max``; ``equal``, the share of
        values that are the same.

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
        "max": difference.max().item() / 255,
        "equal": (difference == 0).double().mean().item(),
    }


def to_uint8(video: Tensor) -> Tensor:
    """``[3, T, H, W]`` in [-1, 1] to uint8 ``[T, H, W, 3]``, rounded as ours are."""
    levels = video.float().clamp(-1, 1).add(1).mul(127.5).round()
    return levels.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu()


@contextmanager
def recorded_noise() -> Iterator[list[Tensor]]:
    """A list of what ``torch.randn`` gives to callers with a generator of their own."""
    drawn: list[Tensor] = []
    randn = torch.randn

    def recording(*shape: Any, **options: Any) -> Tensor:
        noise = randn(*shape, **options)
        if options.get("generator") is not None:
            drawn.append(noise.clone())
        return noise

    torch.randn = recording
    try:
        yield drawn
    finally:
        torch.randn = randn


def with_local_files(config: Any, folder: Path) -> Any:
    """``config`` with each ``hf://org/repo/file`` of its tree taken from ``folder/file``."""
    from dataclasses import fields, replace

    changes = {}
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        if hasattr(value, "__dataclass_fields__"):
            changes[name] = with_local_files(value, folder)
        elif isinstance(value, tuple) and any(hasattr(item, "__dataclass_fields__") for item in value):
            changes[name] = tuple(with_local_files(item, folder) for item in value)
        elif name == "checkpoint_path" and value is not None and value.startswith("hf://"):
            changes[name] = str(folder.joinpath(*value.removeprefix("hf://").split("/")[2:]))
    return replace(config, **changes)


def check_clone(repo: Path) -> None:
    """Exit unless ``repo`` is a clone of the original; say so where it is at another commit."""
    if not (repo / "wan").is_dir():
        sys.exit(f"{repo} has no folder 'wan'; clone the original there (README.md)")
    command = ["git", "-C", str(repo), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if commit != COMMIT:
        print(f"warning: {repo} is at {commit or 'no commit'}; this was written for {COMMIT}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

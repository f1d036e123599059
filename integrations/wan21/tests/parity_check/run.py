"""The original beside ours on a GPU: the same prompt, images, weights and start noise, and how far frames differ.

    python run.py original --repo Wan2.1 --checkpoints Wan2.1-T2V-1.3B --slug wan21-t2v-1.3b --out ref.safetensors
    python run.py ours --checkpoints Wan2.1-T2V-1.3B --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of ours. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "9737cba9c1c3c4d04b33fcad41c111989865d315"
"""Of github.com/Wan-Video/Wan2.1, which this was written for."""

# slug: task of the original, its class, width and height, steps, shift
MODELS = {
    "wan21-t2v-1.3b": ("t2v-1.3B", "WanT2V", (832, 480), 50, 5.0),
    "wan21-t2v-14b": ("t2v-14B", "WanT2V", (1280, 720), 50, 5.0),
    "wan21-i2v-14b-480p": ("i2v-14B", "WanI2V", (832, 480), 40, 3.0),
    "wan21-i2v-14b-720p": ("i2v-14B", "WanI2V", (1280, 720), 40, 5.0),
    "wan21-flf2v-14b-720p": ("flf2v-14B", "WanFLF2V", (1280, 720), 50, 16.0),
}
SOLVERS = ("unipc", "dpm++")
"""Under the same names here and there."""


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its noise and frames")
    first.add_argument("--repo", type=Path, required=True, help=f"clone of Wan-Video/Wan2.1 at {COMMIT[:8]}")
    first.add_argument("--checkpoints", type=Path, required=True, help="folder with the native repository's files")
    first.add_argument("--slug", choices=sorted(MODELS), required=True)
    first.add_argument("--prompt", default="A ginger cat walks along a garden wall at sunset")
    first.add_argument("--image", type=Path, help="first image, for i2v and flf2v")
    first.add_argument("--last-image", type=Path, help="last image, for flf2v; of the first one's size")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--steps", type=int, help="the model's own if not given")
    first.add_argument("--frames", type=int, default=81, help="4n + 1")
    first.add_argument("--solver", choices=SOLVERS, default="unipc")
    first.add_argument("--offload", action="store_true", help="let the original move parts to the CPU between uses")
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second = steps.add_parser("ours", help="run ours on the kept noise and compare")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--checkpoints", type=Path, required=True, help="the same folder")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of our transformer")
    second.add_argument("--threshold", type=float, default=parity.THRESHOLD)
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run the original and write its start noise, its frames and what they were made from."""
    commit = parity.check_clone(arguments.repo, COMMIT)
    sys.path.insert(0, str(arguments.repo.resolve()))
    import wan  # ty: ignore[unresolved-import]
    from PIL import Image
    from wan.configs import WAN_CONFIGS  # ty: ignore[unresolved-import]

    task, kind, (width, height), steps, shift = MODELS[arguments.slug]
    images = [path for path in (arguments.image, arguments.last_image) if path is not None]
    needed = {"WanT2V": 0, "WanI2V": 1, "WanFLF2V": 2}[kind]
    if len(images) != needed:
        sys.exit(f"{arguments.slug} takes {needed} images (--image, --last-image); {len(images)} were given")
    steps = arguments.steps or steps
    config = WAN_CONFIGS[task]
    model = getattr(wan, kind)(config=config, checkpoint_dir=str(arguments.checkpoints), device_id=0, rank=0)
    where = {"max_area": width * height} if images else {"size": (width, height)}
    with parity.recorded("randn", seeded=True) as drawn:
        video = model.generate(
            arguments.prompt, *(Image.open(path).convert("RGB") for path in images), frame_num=arguments.frames,
            shift=shift, sample_solver=arguments.solver, sampling_steps=steps, guide_scale=5.0,
            seed=arguments.seed, offload_model=arguments.offload, **where,
        )  # fmt: skip
    if len(drawn) != 1:
        sys.exit(f"the original drew seeded noise {len(drawn)} times, expected once: is it at commit {COMMIT[:8]}?")
    parity.save_reference(
        arguments.out, {"draw": drawn[0].contiguous(), "frames": parity.to_uint8(video)}, commit=commit,
        slug=arguments.slug, prompt=arguments.prompt, steps=steps, solver=arguments.solver,
        images=[str(path.resolve()) for path in images],
    )  # fmt: skip
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise
    from flashdreams.infra.runner import Runner
    from wan21.config import WAN21_CONFIGS

    about, kept = parity.load_reference(arguments.reference)
    noise, theirs = kept["draw"], kept["frames"]
    images = dict(zip(("image", "last_image"), map(Path, about["images"]), strict=False))
    runner = derive_config(
        parity.with_local_files(WAN21_CONFIGS[about["slug"]], arguments.checkpoints),
        prompt=about["prompt"], num_frames=len(theirs), num_steps=about["steps"], solver=about["solver"],
        device="cuda", dtype=arguments.dtype, **images,
    )  # fmt: skip
    plan = Runner(runner).plan()
    framing = plan.framing
    pipeline = plan.pipeline.setup(device=plan.device)
    (chunk,) = pipeline.rollout(
        about["prompt"], num_frames=framing.num_frames, image=framing.image, last_image=framing.last_image,
        height=framing.height, width=framing.width, noise=GivenNoise(noise[None]),
    )  # fmt: skip
    return parity.verdict(parity.compare(chunk.frames, theirs), arguments.threshold)


if __name__ == "__main__":
    sys.exit(main())

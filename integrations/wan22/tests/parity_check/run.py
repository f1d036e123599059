"""The original beside ours on a GPU: the same prompt, images, weights and start noise, and how far frames differ.

    python run.py original --repo Wan2.2 --checkpoints Wan2.2-TI2V-5B --slug wan22-ti2v-5b --out ref.safetensors
    python run.py ours --checkpoints Wan2.2-TI2V-5B --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of ours. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "42bf4cfaa384bc21833865abc2f9e6c0e67233dc"
"""Of github.com/Wan-Video/Wan2.2, which this was written for."""

# slug: task of the original, its class, width and height, frames, steps, shift, guidance (of the experts: low, high)
MODELS = {
    "wan22-ti2v-5b": ("ti2v-5B", "WanTI2V", (1280, 704), 121, 50, 5.0, 5.0),
    "wan22-t2v-a14b": ("t2v-A14B", "WanT2V", (1280, 720), 81, 40, 12.0, (3.0, 4.0)),
    "wan22-i2v-a14b": ("i2v-A14B", "WanI2V", (1280, 720), 81, 40, 5.0, (3.5, 3.5)),
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
    first.add_argument("--repo", type=Path, required=True, help=f"clone of Wan-Video/Wan2.2 at {COMMIT[:8]}")
    first.add_argument("--checkpoints", type=Path, required=True, help="folder with the native repository's files")
    first.add_argument("--slug", choices=sorted(MODELS), required=True)
    first.add_argument("--prompt", default="A ginger cat walks along a garden wall at sunset")
    first.add_argument("--image", type=Path, help="first image: needed by i2v, possible for ti2v")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--steps", type=int, help="the model's own if not given")
    first.add_argument("--frames", type=int, help="4n + 1; the model's own if not given")
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

    task, kind, (width, height), frames, steps, shift, guidance = MODELS[arguments.slug]
    if arguments.image is None if kind == "WanI2V" else arguments.image is not None and kind == "WanT2V":
        sys.exit(f"{arguments.slug} {'needs' if kind == 'WanI2V' else 'takes no'} image (--image)")
    steps, frames = arguments.steps or steps, arguments.frames or frames
    config = WAN_CONFIGS[task]
    model = getattr(wan, kind)(config=config, checkpoint_dir=str(arguments.checkpoints), device_id=0, rank=0)
    where: dict[str, Any] = {"size": (width, height)} if kind != "WanI2V" else {"max_area": width * height}
    if arguments.image is not None:
        where |= {"img": Image.open(arguments.image).convert("RGB"), "max_area": width * height}
    with parity.recorded("randn", seeded=True) as drawn:
        video = model.generate(
            arguments.prompt, frame_num=frames, shift=shift, sample_solver=arguments.solver,
            sampling_steps=steps, guide_scale=guidance, seed=arguments.seed, offload_model=arguments.offload, **where,
        )  # fmt: skip
    if len(drawn) != 1:
        sys.exit(f"the original drew seeded noise {len(drawn)} times, expected once: is it at commit {COMMIT[:8]}?")
    parity.save_reference(
        arguments.out, {"draw": drawn[0].contiguous(), "frames": parity.to_uint8(video)}, commit=commit,
        slug=arguments.slug, prompt=arguments.prompt, steps=steps, solver=arguments.solver,
        image=None if arguments.image is None else str(arguments.image.resolve()),
    )  # fmt: skip
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise
    from flashdreams.infra.runner import Runner
    from wan22.config import WAN22_CONFIGS

    about, kept = parity.load_reference(arguments.reference)
    noise, theirs = kept["draw"], kept["frames"]
    image = None if about["image"] is None else Path(about["image"])
    runner = derive_config(
        parity.with_local_files(WAN22_CONFIGS[about["slug"]], arguments.checkpoints),
        prompt=about["prompt"], num_frames=len(theirs), num_steps=about["steps"], solver=about["solver"], image=image,
        device="cuda", dtype=arguments.dtype,
    )  # fmt: skip
    plan = Runner(runner).plan()
    framing = plan.framing
    pipeline = plan.pipeline.setup(device=plan.device)
    (chunk,) = pipeline.rollout(
        about["prompt"], num_frames=framing.num_frames, image=framing.image,
        height=framing.height, width=framing.width, noise=GivenNoise(noise[None]),
    )  # fmt: skip
    return parity.verdict(parity.compare(chunk.frames, theirs), arguments.threshold)


if __name__ == "__main__":
    sys.exit(main())

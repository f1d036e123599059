"""The original beside ours on a GPU: the same prompt, image, camera path, weights and noise, and how far frames differ.

    python run.py original --repo lingbot-world --checkpoints lingbot-world-base-cam --image street.png --path path \
        --out ref.safetensors
    python run.py ours --checkpoints lingbot-world-base-cam --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of ours. See README.md.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "6ca87d4ca37972292d577840d6300671b048ef3b"
"""Of github.com/Robbyant/lingbot-world, which this was written for: it has the camera model alone."""
SLUG, STEPS, SHIFT, GUIDANCE, AREA = "lingbot-world-cam", 70, 10.0, 5.0, 480 * 832


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its noise and frames")
    first.add_argument("--repo", type=Path, required=True, help=f"clone of Robbyant/lingbot-world at {COMMIT[:8]}")
    first.add_argument(
        "--checkpoints", type=Path, required=True, help="folder with the files of its repository of weights"
    )
    first.add_argument("--image", type=Path, required=True, help="first frame")
    first.add_argument("--path", type=Path, required=True, help="folder with poses.npy and intrinsics.npy")
    first.add_argument("--prompt", default="A first-person walk through an old town in the morning sun")
    first.add_argument("--negative-prompt", default="", help="given to both; ours has not the original's own")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--steps", type=int, default=STEPS)
    first.add_argument("--frames", type=int, default=81, help="4n + 1, at most as many as there are poses")
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

    model = wan.WanI2V(config=WAN_CONFIGS["i2v-A14B"], checkpoint_dir=str(arguments.checkpoints), device_id=0, rank=0)
    options: dict[str, Any] = {
        "action_path": str(arguments.path), "max_area": AREA, "frame_num": arguments.frames, "shift": SHIFT,
        "sample_solver": "unipc", "sampling_steps": arguments.steps, "guide_scale": GUIDANCE,
        "n_prompt": arguments.negative_prompt, "seed": arguments.seed, "offload_model": arguments.offload,
    }  # fmt: skip
    unknown = options.keys() - inspect.signature(model.generate).parameters.keys()
    if unknown:
        sys.exit(f"the original's generate() takes no {', '.join(sorted(unknown))}: is it at commit {COMMIT[:8]}?")
    with parity.recorded("randn", seeded=True) as drawn:
        video = model.generate(arguments.prompt, Image.open(arguments.image).convert("RGB"), **options)
    if len(drawn) != 1:
        sys.exit(f"the original drew seeded noise {len(drawn)} times, expected once: is it at commit {COMMIT[:8]}?")
    parity.save_reference(
        arguments.out, {"noise": drawn[0].contiguous(), "frames": parity.to_uint8(video)}, commit=commit, slug=SLUG,
        prompt=arguments.prompt, negative_prompt=arguments.negative_prompt, steps=arguments.steps,
        image=str(arguments.image.resolve()), camera=str(arguments.path.resolve()),
    )  # fmt: skip
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the reference, and compare the frames. ``draw0000``, ... of the reference are the draws
    with which a few-step model noised its estimates, ``[T, 16, h, w]`` in order."""
    import torch

    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise
    from flashdreams.infra.runner import Runner
    from lingbot.config import LINGBOT_CONFIGS

    about, kept = parity.load_reference(arguments.reference)
    runner = derive_config(
        parity.with_local_files(LINGBOT_CONFIGS[about["slug"]], arguments.checkpoints),
        prompt=about["prompt"], negative_prompt=about["negative_prompt"] or None, num_frames=len(kept["frames"]),
        num_steps=about["steps"], image=Path(about["image"]), control=about["camera"], device="cuda",
        dtype=arguments.dtype,
    )  # fmt: skip
    plan = Runner(runner).plan()
    framing = plan.framing
    pipeline = plan.pipeline.setup(device=plan.device)
    draws = [kept[name] for name in sorted(kept) if name.startswith("draw")]
    between = len(pipeline.diffusion_model.scheduler.steps) - 1
    noise = GivenNoise(kept["noise"][None], parity.draws_by_step(draws, lambda chunk: between))
    length = {"num_chunk": framing.num_chunk} if framing.num_frames is None else {"num_frames": framing.num_frames}
    chunks = pipeline.rollout(
        about["prompt"], negative_prompt=about["negative_prompt"] or None, image=framing.image,
        height=framing.height, width=framing.width, control=plan.control, noise=noise, **length,
    )  # fmt: skip
    frames = torch.cat([chunk.frames for chunk in chunks])
    return parity.verdict(parity.compare(frames, kept["frames"]), arguments.threshold)


if __name__ == "__main__":
    sys.exit(main())

"""The original beside ours on a GPU: the same small video, weights and noise; how far the large frames differ.

    python run.py original --repo FlashVSR --video clip.mp4 --out ref.safetensors
    python run.py ours --reference ref.safetensors --weights FlashVSR/examples/WanVSR/FlashVSR

Two steps, since the two need different environments; the first imports nothing of flashdreams. See README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "ccac0ac457243a47c13997682ebbaf987dabbea7"
"""Of github.com/OpenImagingLab/FlashVSR, which this was written for."""
SCALE = 4
CELL = 128 // SCALE
"""Small pixels that the original cuts to whole multiples of; the video is cut here, so that it has nothing to cut."""


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its input, noise and frames")
    first.add_argument("--repo", type=Path, required=True, help=f"clone of FlashVSR at {COMMIT[:8]}, set up to run")
    first.add_argument(
        "--script", type=Path, default=Path("examples/WanVSR/infer_flashvsr_tiny.py"),
        help="its script that builds the pipeline, from the clone's root; another for version 1.1",
    )  # fmt: skip
    first.add_argument("--video", type=Path, required=True, help="a small video, of at least 21 frames")
    first.add_argument("--frames", type=int, default=45, help="8 m + 5 of them, which the original gives back whole")
    first.add_argument("--sparse-ratio", type=float, default=2.0)
    first.add_argument("--local-range", type=int, default=11)
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second = steps.add_parser("ours", help="run ours on the kept video and noise and compare")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--weights", type=Path, required=True, help="folder of the same weights, and posi_prompt.pth")
    second.add_argument("--slug", default="flashvsr-v1.0-x4", help="flashvsr-x4 for version 1.1")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of all our parts")
    second.add_argument("--threshold", type=float, default=parity.THRESHOLD)
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run the original's pipeline and keep what it was given, drew and made."""
    if arguments.frames < 21 or arguments.frames % 8 != 5:
        sys.exit(
            f"--frames is {arguments.frames}; expected 21, 29, 37, ...: of others the original loses the last ones"
        )
    commit = parity.check_clone(arguments.repo, COMMIT)
    small, out = read_small(arguments.video, arguments.frames), arguments.out.resolve()
    script = (arguments.repo / arguments.script).resolve()
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location("flashvsr_original", script)
    if spec is None or spec.loader is None:
        sys.exit(f"{script} is no Python script; give another with --script")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_grad_enabled(False)
    pipeline = module.init_pipeline()
    height, width = SCALE * small.shape[1], SCALE * small.shape[2]
    low = as_the_original_takes_it(small)
    with parity.recorded("randn", seeded=True) as drawn:
        video = pipeline(
            prompt="", negative_prompt="", cfg_scale=1.0, num_inference_steps=1, seed=arguments.seed,
            LQ_video=low.to("cuda", torch.bfloat16), num_frames=low.shape[2], height=height, width=width,
            is_full_block=False, if_buffer=True, topk_ratio=arguments.sparse_ratio * 768 * 1280 / (height * width),
            kv_ratio=3.0, local_range=arguments.local_range, color_fix=True,
        )  # fmt: skip
    made = parity.to_uint8(video[0] if video.ndim == 5 else video)
    if len(made) != len(small) or len(drawn) != 1:
        sys.exit(
            f"the original made {len(made)} frames of {len(small)} from {len(drawn)} draws; expected all, from one"
        )
    about = {"sparse_ratio": arguments.sparse_ratio, "local_range": arguments.local_range, "commit": commit}
    parity.save_reference(out, {"small": small, "noise": drawn[0].contiguous(), "frames": made}, **about)
    return 0


def read_small(path: Path, count: int) -> Tensor:
    """The first ``count`` frames, cut on the right and below to whole cells: uint8 ``[F, h, w, 3]``."""
    import imageio.v2 as imageio

    with imageio.get_reader(path) as reader:
        frames = [torch.from_numpy(frame) for frame, _ in zip(reader, range(count), strict=False)]
    if len(frames) < count:
        sys.exit(f"{path} has {len(frames)} frames; {count} are asked for (--frames)")
    height, width = (side // CELL * CELL for side in frames[0].shape[:2])
    if not height or not width:
        sys.exit(f"{path} is {tuple(frames[0].shape[:2])} (height x width); at least {CELL} each are needed")
    return torch.stack(frames)[:, :height, :width, :3].contiguous()


def as_the_original_takes_it(small: Tensor) -> Tensor:
    """What its scripts make of a video: bicubic by PIL, the last frame four times more, ``[1, 3, F, H, W]``."""
    import numpy as np
    from PIL import Image

    size = SCALE * small.shape[2], SCALE * small.shape[1]
    frames = [np.array(Image.fromarray(frame.numpy()).resize(size, Image.Resampling.BICUBIC)) for frame in small]
    pixels = torch.from_numpy(np.stack([*frames, *[frames[-1]] * 4]))
    return (pixels.float() / 255 * 2 - 1).permute(3, 0, 1, 2)[None]


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the video and the noise of the original, and compare the frames."""
    from flashdreams.config import derive_config
    from flashdreams.core.controls import Control, Frame
    from flashdreams.core.noise import GivenNoise
    from flashvsr.config import FLASHVSR_CONFIGS

    about, kept = parity.load_reference(arguments.reference)
    pipeline = FLASHVSR_CONFIGS[arguments.slug].pipeline
    network = {"sparse_ratio": about["sparse_ratio"], "local_range": about["local_range"]}
    parts = {part: {"dtype": arguments.dtype} for part in ("encoder", "decoder", "text_encoder")}
    changes = {**parts, "diffusion_model": {"transformer": {"dtype": arguments.dtype, "network": network}}}
    model = parity.with_local_files(derive_config(pipeline, changes), arguments.weights).setup(device=device())
    _, height, width, _ = kept["frames"].shape
    chunks = model.rollout(
        control=[Control(frame=Frame(frame.numpy())) for frame in kept["small"]], noise=GivenNoise(kept["noise"]),
        num_frames=len(kept["small"]), height=height, width=width,
    )  # fmt: skip
    frames = torch.cat([chunk.frames for chunk in chunks])[: len(kept["frames"])]
    return parity.verdict(parity.compare(frames, kept["frames"]), arguments.threshold)


def device() -> str:
    """Where ours runs."""
    return "cuda"


if __name__ == "__main__":
    sys.exit(main())

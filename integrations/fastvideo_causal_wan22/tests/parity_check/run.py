"""FastVideo beside ours on a GPU: the same prompt, picture, weights, start noise and re-noise draws.

    PYTHONPATH=record RECORD=draws python run.py original --model MODEL --image first.png --out ref.safetensors
    python run.py ours --model MODEL --image first.png --reference ref.safetensors

Two steps, since the two need different environments; the first imports nothing of flashdreams. See README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "2f3d4074"
"""Of github.com/hao-ai-lab/FastVideo, the commit whose files were read."""

STEPS = 8


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run FastVideo and keep its noise and frames")
    second = steps.add_parser("ours", help="run ours on the kept noise and compare")
    for each in (first, second):
        each.add_argument("--model", type=Path, required=True, help="folder of CausalWan2.2-I2V-A14B-Preview-Diffusers")
        each.add_argument("--image", type=Path, required=True, help="first frame, of 832x480 pixels")
    first.add_argument("--prompt", default="The cat jumps off the wall")
    first.add_argument("--frames", type=int, default=81, help="pixel frames asked for; the last latents are cut off")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of our transformers")
    second.add_argument(
        "--own-cross-attention", action="store_true",
        help="do not repeat that FastVideo's low-noise expert reads the text keys of the high-noise one",
    )  # fmt: skip
    second.add_argument("--threshold", type=float, default=parity.THRESHOLD)
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run FastVideo and keep what its worker drew and what it made."""
    if "RECORD" not in os.environ:
        sys.exit("the draws are not recorded: run with PYTHONPATH=record RECORD=<an empty folder>, see README.md")
    from fastvideo import VideoGenerator

    generator = VideoGenerator.from_pretrained(str(arguments.model), num_gpus=1)
    made: Any = generator.generate_video(
        arguments.prompt, image_path=str(arguments.image), num_frames=arguments.frames, height=480, width=832,
        seed=arguments.seed, save_video=False, return_frames=True,
    )  # fmt: skip
    frames = made["frames"] if isinstance(made, dict) else made
    video = torch.stack([torch.as_tensor(frame) for frame in frames]).to(torch.uint8)
    files = sorted(Path(os.environ["RECORD"]).glob("*.pt"))
    tensors = split_draws([torch.load(file, weights_only=True) for file in files])
    parity.save_reference(arguments.out, tensors | {"frames": video.contiguous()}, prompt=arguments.prompt)
    return 0


def split_draws(draws: list[Tensor]) -> dict[str, Tensor]:
    """The start noise of the whole clip, and the re-noise draws after it, each as ``[T, C, h, w]``.

    The one of the last high-noise step is drawn and thrown away by FastVideo; it stays in its place.
    """
    latents = [draw for draw in draws if draw.ndim == 5 and 16 in (draw.shape[1], draw.shape[2])]
    if not latents:
        sys.exit(f"none of {len(draws)} draws is a latent [1, 16, T, h, w] or [1, T, 16, h, w]")
    first = max(range(len(latents)), key=lambda i: latents[i].numel())
    frames_first = [draw[0] if draw.shape[2] == 16 else draw[0].transpose(0, 1) for draw in latents]
    tensors = {f"draw{i:04d}": draw.contiguous() for i, draw in enumerate(frames_first[first + 1 :])}
    return tensors | {"noise": frames_first[first].contiguous()}


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from fastvideo_causal_wan22.config import PIPELINE_FASTVIDEO_CAUSAL_WAN22_I2V_A14B
    from flashdreams.config import derive_config
    from flashdreams.core.media.image import read_image
    from flashdreams.core.noise import GivenNoise

    about, kept = parity.load_reference(arguments.reference)
    model = {
        "transformer": {"checkpoint_path": str(arguments.model / "transformer_2"), "dtype": arguments.dtype},
        "high_noise.0.transformer": {
            "checkpoint_path": str(arguments.model / "transformer"), "dtype": arguments.dtype,
        },
    }  # fmt: skip
    config = derive_config(
        PIPELINE_FASTVIDEO_CAUSAL_WAN22_I2V_A14B,
        diffusion_model=model, decoder={"checkpoint_path": str(arguments.model / "vae")},
    )  # fmt: skip
    pipeline = config.setup(device="cuda")
    draws = [kept[name] for name in sorted(kept) if name.startswith("draw")]
    noise = GivenNoise(kept["noise"].transpose(0, 1)[None], parity.draws_by_step(draws, lambda chunk: STEPS - 1, 1))
    picture = torch.from_numpy(read_image(arguments.image, config.height, config.width).pixels)
    rollout = pipeline.rollout(about["prompt"], image=picture, num_chunk=1 + len(draws) // (STEPS - 1), noise=noise)
    if not arguments.own_cross_attention:
        share_cross_attention(rollout.cache.experts)
    frames = torch.cat([chunk.frames for chunk in rollout])
    length = min(len(frames), len(kept["frames"]))
    return parity.verdict(parity.compare(frames[:length], kept["frames"][:length]), arguments.threshold)


def share_cross_attention(experts: list[Any]) -> None:
    """FastVideo keeps one cross-attention cache, which the high-noise expert fills."""
    high, low = experts
    for ours, theirs in zip(low.branches[0].blocks, high.branches[0].blocks, strict=True):
        ours.text_k, ours.text_v = theirs.text_k, theirs.text_v


if __name__ == "__main__":
    sys.exit(main())

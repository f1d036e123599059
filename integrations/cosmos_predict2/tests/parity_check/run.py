"""The pipeline of diffusers beside ours on a GPU: the same prompt, image, weights and start noise, and how far frames
differ.

    python run.py original --checkpoints Cosmos-Predict2.5-2B --slug cosmos-predict2.5-2b --out ref.safetensors
    python run.py ours --checkpoints Cosmos-Predict2.5-2B --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of ours. See README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

VERSION = "0.42.1"
"""Of diffusers, which this was written for."""
SLUGS = ("cosmos-predict2.5-2b", "cosmos-predict2.5-14b")
GUIDANCE = 7.0
"""In the convention of the original; ours is one more."""
SHIFT, GIVEN_TIMESTEP, QK_EPS = 5.0, 0.1, 1e-5


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the pipeline of diffusers and keep its noise and frames")
    first.add_argument(
        "--checkpoints", type=Path, required=True, help="folder with the repository, in diffusers' layout"
    )
    first.add_argument("--slug", choices=SLUGS, required=True)
    first.add_argument("--prompt", default="A delivery robot rolls along a wet street at dusk")
    first.add_argument("--image", type=Path, help="first image, of --width and --height")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--steps", type=int, default=35)
    first.add_argument("--frames", type=int, default=93, help="4n + 1")
    first.add_argument("--height", type=int, default=704)
    first.add_argument("--width", type=int, default=1280)
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second = steps.add_parser("ours", help="run ours on the kept noise and compare")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--checkpoints", type=Path, required=True, help="the same folder")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of our transformer")
    second.add_argument("--threshold", type=float, default=parity.THRESHOLD)
    for step in (first, second):
        step.add_argument("--repeat", type=int, default=1, help="runs; the seconds of the last are printed")
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run the pipeline of diffusers; write its start noise, its frames and what they were made from."""
    import diffusers

    if diffusers.__version__ != VERSION:
        print(f"diffusers is {diffusers.__version__}, this was written for {VERSION}: check it", file=sys.stderr)
    kind = diffusers.Cosmos2_5_PredictBasePipeline
    pipeline = kind.from_pretrained(arguments.checkpoints, torch_dtype=torch.bfloat16).to("cuda")
    about, kept = run_original(pipeline, arguments)
    parity.save_reference(arguments.out, kept, version=diffusers.__version__, **about)
    return 0


def run_original(
    pipeline: Any, arguments: argparse.Namespace, **request: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the frames were made from, and the noise and the frames.

    The solver is UniPC with the shift of the original instead of the one in the repository, so that both sides have one
    table. The frames are decoded here: the guard of the pipeline judges the prompt, but is not to paint over frames.
    """
    from diffusers import UniPCMultistepScheduler

    pipeline.scheduler = UniPCMultistepScheduler(
        flow_shift=SHIFT, use_flow_sigmas=True, prediction_type="flow_prediction"
    )
    height, width, frames = arguments.height, arguments.width, arguments.frames
    shape = 1, pipeline.vae.config.z_dim, (frames + 3) // 4, height // 8, width // 8
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(arguments.seed))
    if arguments.image is not None:
        request |= {"video": pixels(arguments.image, height, width), "num_latent_conditional_frames": 1}
    request = {"prompt": arguments.prompt} | request
    for _ in range(arguments.repeat):
        begun = time.perf_counter()
        latent = pipeline(
            height=height, width=width, num_frames=frames, num_inference_steps=arguments.steps,
            guidance_scale=GUIDANCE, conditional_frame_timestep=GIVEN_TIMESTEP / 1000, latents=noise.clone(),
            output_type="latent", return_dict=False, **request,
        )[0]  # fmt: skip
        mean, std = (
            torch.tensor(values, device=latent.device).view(1, -1, 1, 1, 1)
            for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std)
        )
        video = pipeline.vae.decode((latent * std + mean).to(pipeline.vae.dtype), return_dict=False)[0]
        made = parity.to_uint8(video[0].detach())
        print(f"original: {time.perf_counter() - begun:.2f} seconds")
    image = None if arguments.image is None else str(arguments.image.resolve())
    about = {"slug": arguments.slug, "prompt": arguments.prompt, "steps": arguments.steps, "image": image}
    return about, {"draw": noise, "frames": made}


def pixels(path: Path, height: int, width: int) -> Tensor:
    """The image as a clip of one frame, ``[1, 3, 1, H, W]`` in [-1, 1]; it must have the size of the video, since the
    two sides scale by different filters."""
    import numpy as np
    from PIL import Image

    image = np.asarray(Image.open(path).convert("RGB"))
    if image.shape[:2] != (height, width):
        sys.exit(f"{path} is {image.shape[1]}x{image.shape[0]}; scale it to {width}x{height} first")
    return torch.from_numpy(image.copy()).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from cosmos_predict2.config import COSMOS_PREDICT2_CONFIGS
    from flashdreams.config import derive_config

    about, kept = parity.load_reference(arguments.reference)
    folder = arguments.checkpoints
    pipeline = derive_config(
        COSMOS_PREDICT2_CONFIGS[about["slug"]].pipeline,
        text_encoder={"checkpoint_path": str(folder / "text_encoder")},
        diffusion_model={
            "transformer": {"checkpoint_path": str(folder / "transformer"), "dtype": arguments.dtype},
        },
        decoder={"checkpoint_path": str(folder / "vae")},
    )
    made = run_ours(pipeline, about, kept, device="cuda", repeat=arguments.repeat)
    return parity.verdict(parity.compare(made, kept["frames"]), arguments.threshold)


def run_ours(
    config: Any, about: dict[str, Any], kept: dict[str, Tensor], *, device: str, repeat: int = 1, conditions: Any = None
) -> Tensor:
    """Frames uint8 ``[T, H, W, 3]`` of ours with what diffusers differs in: its table of noise levels, told to the
    network as they are, and its epsilon of queries and keys."""
    from dataclasses import replace

    from flashdreams.config import derive_config
    from flashdreams.core.media.image import read_image
    from flashdreams.core.noise import GivenNoise

    config = derive_config(
        config,
        diffusion_model={
            "transformer": {
                "guidance_scale": 1 + GUIDANCE, "given_timestep": GIVEN_TIMESTEP, "network": {"qk_eps": QK_EPS},
            },
            "scheduler": {"num_steps": about["steps"], "shift": SHIFT, "table": "diffusers"},
        },
    )  # fmt: skip
    pipeline, frames = config.setup(device=device), kept["frames"]
    scheduler = pipeline.diffusion_model.scheduler
    scheduler.steps = tuple(replace(step, timestep=1000 * step.sigma) for step in scheduler.steps)
    height, width = frames.shape[1:3]
    image = None
    if about["image"] is not None:
        image = torch.from_numpy(read_image(about["image"], height, width).pixels)
    for _ in range(repeat):
        begun = time.perf_counter()
        (chunk,) = pipeline.rollout(
            about["prompt"], conditions=conditions, num_frames=len(frames), image=image, height=height, width=width,
            noise=GivenNoise(kept["draw"]),
        )  # fmt: skip
        print(f"ours: {time.perf_counter() - begun:.2f} seconds, of these {chunk.timings}")
    return chunk.frames.reshape(frames.shape)


if __name__ == "__main__":
    sys.exit(main())

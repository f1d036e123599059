"""The original beside ours on a GPU: the same prompt, weights, start noise and re-noise draws; how far frames differ.

    python run.py original --repo Self-Forcing --checkpoint self_forcing_dmd.pt --out ref.safetensors
    python run.py ours --checkpoint self_forcing_dmd.pt --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of flashdreams. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "33593df3e81fa3ec10239271dd2c100facac6de1"
"""Of github.com/guandeh17/Self-Forcing, which this was written for."""


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its noise and frames")
    first.add_argument("--repo", type=Path, required=True, help=f"clone of Self-Forcing at {COMMIT[:8]}, set up to run")
    first.add_argument("--config", default="configs/self_forcing_dmd.yaml", help="its settings, from the clone's root")
    first.add_argument("--checkpoint", type=Path, required=True, help="self_forcing_dmd.pt")
    first.add_argument("--prompt", default="A ginger cat walks along a garden wall at sunset")
    first.add_argument("--frames", type=int, default=21, help="latent frames, a multiple of 3; 21 is what it can make")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second = steps.add_parser("ours", help="run ours on the kept noise and compare")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--checkpoint", type=Path, required=True, help="the same file")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of our transformer")
    second.add_argument("--threshold", type=float, default=parity.THRESHOLD)
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run the original and keep what it drew and made."""
    commit = parity.check_clone(arguments.repo, COMMIT)
    checkpoint, out = arguments.checkpoint.resolve(), arguments.out.resolve()
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["generator_ema"]
    tensors = parity.run_causal_pipeline(
        arguments.repo, arguments.config, state, prompt=arguments.prompt, frames=arguments.frames, seed=arguments.seed
    )
    parity.save_reference(out, tensors, prompt=arguments.prompt, commit=commit)
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise
    from self_forcing.config import PIPELINE_SELF_FORCING_T2V_1_3B

    about, kept = parity.load_reference(arguments.reference)
    changes = {"checkpoint_path": str(arguments.checkpoint), "dtype": arguments.dtype}
    config = derive_config(PIPELINE_SELF_FORCING_T2V_1_3B, diffusion_model={"transformer": changes})
    pipeline = config.setup(device="cuda")
    draws = [kept[name] for name in sorted(kept) if name.startswith("draw")]
    between = len(pipeline.diffusion_model.scheduler.steps) - 1
    noise = GivenNoise(kept["noise"].transpose(1, 2), parity.draws_by_step(draws, lambda chunk: between))
    chunks = pipeline.rollout(about["prompt"], num_chunk=kept["noise"].shape[1] // 3, noise=noise)
    frames = torch.cat([chunk.frames for chunk in chunks])
    return parity.verdict(parity.compare(frames, kept["frames"]), arguments.threshold)


if __name__ == "__main__":
    sys.exit(main())

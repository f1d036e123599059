r"""The original beside ours on a GPU: the same prompt, weights, start noise and re-noise draws; how far frames differ.

    python run.py original --repo Causal-Forcing --slug causal-forcing-t2v-1.3b --checkpoint causal_forcing.pt \
        --config configs/causal_forcing_dmd_chunkwise.yaml --out ref.safetensors
    python run.py ours --checkpoint causal_forcing.pt --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of flashdreams. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = ""
"""Of github.com/thu-ml/Causal-Forcing: any. None was at hand where this was written; what is called is the interface of
Self-Forcing at 33593df3, which it has in common. The commit that was used is kept with the reference."""

SLUGS = ("causal-forcing-t2v-1.3b", "causal-forcing-t2v-1.3b-framewise")


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its noise and frames")
    first.add_argument("--repo", type=Path, required=True, help="clone of Causal-Forcing, set up to run")
    first.add_argument("--slug", choices=SLUGS, required=True)
    first.add_argument("--config", required=True, help="its settings for the file, from the clone's root")
    first.add_argument("--checkpoint", type=Path, required=True, help="causal_forcing.pt of the slug's kind")
    first.add_argument("--entry", default="generator_ema", help="state dict in the file: generator_ema or generator")
    first.add_argument("--prompt", default="A ginger cat walks along a garden wall at sunset")
    first.add_argument("--frames", type=int, default=21, help="latent frames; 21 is what it can make")
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
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)[arguments.entry]
    tensors = parity.run_causal_pipeline(
        arguments.repo, arguments.config, state, prompt=arguments.prompt, frames=arguments.frames, seed=arguments.seed
    )
    about = {"slug": arguments.slug, "entry": arguments.entry, "prompt": arguments.prompt}
    parity.save_reference(out, tensors, **about, commit=commit)
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from causal_forcing.config import CAUSAL_FORCING_CONFIGS
    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise

    about, kept = parity.load_reference(arguments.reference)
    changes = {"checkpoint_path": f"{arguments.checkpoint}#{about['entry']}", "dtype": arguments.dtype}
    config = derive_config(CAUSAL_FORCING_CONFIGS[about["slug"]].pipeline, diffusion_model={"transformer": changes})
    pipeline = config.setup(device="cuda")
    draws = [kept[name] for name in sorted(kept) if name.startswith("draw")]
    between = len(pipeline.diffusion_model.scheduler.steps) - 1
    noise = GivenNoise(kept["noise"].transpose(1, 2), parity.draws_by_step(draws, lambda chunk: between))
    length = pipeline.config.diffusion_model.transformer.len_t
    chunks = pipeline.rollout(about["prompt"], num_chunk=kept["noise"].shape[1] // length, noise=noise)
    frames = torch.cat([chunk.frames for chunk in chunks])
    return parity.verdict(parity.compare(frames, kept["frames"]), arguments.threshold)


if __name__ == "__main__":
    sys.exit(main())

"""The original beside ours on a GPU: the same prompt, weights, start noise and re-noise draws; how far frames differ.

    python run.py original --repo LongLive --base longlive_base.pt --lora lora.pt --out ref.safetensors
    python run.py ours --base longlive_base.pt --lora lora.pt --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of flashdreams. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "9266de9c"
"""Of LongLive 1.0, the commit whose settings were read; its loop is that of Self-Forcing at 33593df3."""


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its noise and frames")
    first.add_argument("--repo", type=Path, required=True, help=f"clone of LongLive at {COMMIT}, set up to run")
    first.add_argument(
        "--config", default="configs/longlive_inference.yaml", help="its settings, from the clone's root"
    )
    first.add_argument("--base", type=Path, required=True, help="longlive_base.pt")
    first.add_argument("--lora", type=Path, required=True, help="lora.pt")
    first.add_argument("--prompt", default="A ginger cat walks along a garden wall at sunset")
    first.add_argument("--frames", type=int, default=30, help="latent frames, a multiple of the chunk")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second = steps.add_parser("ours", help="run ours on the kept noise and compare")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--base", type=Path, required=True, help="the same file")
    second.add_argument("--lora", type=Path, required=True, help="the same file")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of our transformer")
    second.add_argument("--threshold", type=float, default=parity.THRESHOLD)
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run the original, with the LoRA merged before it is loaded, and keep what it drew and made."""
    commit = parity.check_clone(arguments.repo, COMMIT)
    out = arguments.out.resolve()
    base, lora = (torch.load(path, map_location="cpu", weights_only=True) for path in (arguments.base, arguments.lora))
    state = parity.merged_lora(base.get("generator", base), lora.get("generator_lora", lora))
    tensors = parity.run_causal_pipeline(
        arguments.repo, arguments.config, state, prompt=arguments.prompt, frames=arguments.frames, seed=arguments.seed
    )
    parity.save_reference(out, tensors, prompt=arguments.prompt, commit=commit)
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise
    from longlive.config import PIPELINE_LONGLIVE_T2V_1_3B

    about, kept = parity.load_reference(arguments.reference)
    draws = [kept[name] for name in sorted(kept) if name.startswith("draw")]
    changes = {
        "checkpoint_path": str(arguments.base),
        "lora": {"checkpoint_path": str(arguments.lora)},
        "dtype": arguments.dtype,
        "len_t": len(draws[0]),  # 3 or 6, as the original's settings had it
    }
    config = derive_config(PIPELINE_LONGLIVE_T2V_1_3B, diffusion_model={"transformer": changes})
    pipeline = config.setup(device="cuda")
    between = len(pipeline.diffusion_model.scheduler.steps) - 1
    noise = GivenNoise(kept["noise"].transpose(1, 2), parity.draws_by_step(draws, lambda chunk: between))
    chunks = pipeline.rollout(about["prompt"], num_chunk=kept["noise"].shape[1] // len(draws[0]), noise=noise)
    frames = torch.cat([chunk.frames for chunk in chunks])
    return parity.verdict(parity.compare(frames, kept["frames"]), arguments.threshold)


if __name__ == "__main__":
    sys.exit(main())

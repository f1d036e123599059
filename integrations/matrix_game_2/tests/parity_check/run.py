"""The original beside ours on a GPU: the same picture, actions, weights, start noise and re-noise draws; how far frames
differ.

    python run.py original --repo Matrix-Game/Matrix-Game-2 --models Matrix-Game-2.0 --slug matrix-game-2-universal \\
        --image street.png --out ref.safetensors
    python run.py ours --models Matrix-Game-2.0 --reference ref.safetensors

Two steps, since the two may need different environments; the first imports nothing of flashdreams. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import parity  # noqa: E402

COMMIT = "62dedd1a0ef512988e52fb16b169f08e724253d1"
"""Of github.com/zoheth/Matrix-Game, a fork of SkyworkAI/Matrix-Game, whose modules the goldens were made with."""

# slug: its settings in the clone, its weights among the models
MODELS = {
    "matrix-game-2-universal": (
        "configs/inference_yaml/inference_universal.yaml", "base_distilled_model/base_distill.safetensors"),
    "matrix-game-2-gta-drive": (
        "configs/inference_yaml/inference_gta_drive.yaml", "gta_distilled_model/gta_keyboard2dim.safetensors"),
    "matrix-game-2-templerun": (
        "configs/inference_yaml/inference_templerun.yaml",
        "templerun_distilled_model/templerun_7dim_onlykey.safetensors"),
}  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Run one of the two steps; 1 if the frames differ by more than the threshold."""
    arguments = parser().parse_args(words)
    return original(arguments) if arguments.step == "original" else ours(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = whole.add_subparsers(dest="step", required=True)
    first = steps.add_parser("original", help="run the original implementation and keep its noise and frames")
    first.add_argument("--repo", type=Path, required=True, help=f"Matrix-Game-2 in a clone at {COMMIT[:8]}")
    first.add_argument("--models", type=Path, required=True, help="folder with the files of Skywork/Matrix-Game-2.0")
    first.add_argument("--slug", choices=sorted(MODELS), required=True)
    first.add_argument("--image", type=Path, required=True)
    first.add_argument("--config", help="its settings, from the folder of the clone; the slug's own if not given")
    first.add_argument("--frames", type=int, default=30, help="latent frames, a multiple of 3")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    second = steps.add_parser("ours", help="run ours on the kept noise and compare")
    second.add_argument("--reference", type=Path, required=True, help="the file that the first step wrote")
    second.add_argument("--models", type=Path, required=True, help="the same folder")
    second.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of our transformer")
    second.add_argument("--threshold", type=float, default=parity.THRESHOLD)
    return whole


def original(arguments: argparse.Namespace) -> int:
    """Run the original under the actions that its script draws, and keep what it was given, drew and made."""
    import os

    commit = parity.check_clone(arguments.repo, COMMIT)
    config, weights = MODELS[arguments.slug]
    models, image, out = (path.resolve() for path in (arguments.models, arguments.image, arguments.out))
    os.chdir(arguments.repo)
    sys.path.insert(0, os.getcwd())
    import inference  # ty: ignore[unresolved-import]

    settings = argparse.Namespace(
        config_path=arguments.config or config, checkpoint_path=str(models / weights), img_path=str(image),
        output_folder=str(out.with_suffix("")), num_output_frames=arguments.frames, seed=arguments.seed,
        pretrained_model_path=str(models),
    )  # fmt: skip
    Path(settings.output_folder).mkdir(exist_ok=True)
    torch.manual_seed(arguments.seed)
    game = inference.InteractiveGameInference(settings)
    kept: dict[str, Tensor] = {}
    generate = game.pipeline.inference

    def recording(*given: Any, **options: Any) -> Any:
        told = options["conditional_dict"]
        kept.update(noise=options["noise"], keyboard=told["keyboard_cond"])
        if "mouse_cond" in told:
            kept["mouse"] = told["mouse_cond"]
        with parity.recorded("randn_like") as drawn:
            videos = generate(*given, **options)
        kept.update({f"draw{i:04d}": draw for i, draw in enumerate(drawn)})
        kept["frames"] = parity.to_uint8(torch.cat(list(videos), dim=1)[0].transpose(0, 1))
        return videos

    game.pipeline.inference = recording
    game.generate_videos()
    if not kept:
        sys.exit(f"the original never called its pipeline: is it at commit {COMMIT[:8]}?")
    tensors = {name: (value if name == "frames" else value.float()).cpu().contiguous() for name, value in kept.items()}
    parity.save_reference(out, tensors, commit=commit, slug=arguments.slug, image=str(image))
    return 0


def ours(arguments: argparse.Namespace) -> int:
    """Run ours on the noise of the original, and compare the frames."""
    from flashdreams.config import derive_config
    from flashdreams.core.noise import GivenNoise
    from flashdreams.infra.runner import Runner
    from matrix_game_2.config import MATRIX_GAME_2_CONFIGS

    about, kept = parity.load_reference(arguments.reference)
    runner = parity.with_local_files(MATRIX_GAME_2_CONFIGS[about["slug"]], arguments.models)
    runner = derive_config(runner, image=Path(about["image"]), device="cuda", dtype=arguments.dtype)
    plan = Runner(runner).plan()
    pipeline = plan.pipeline.setup(device=plan.device)
    draws = [kept[name] for name in sorted(kept) if name.startswith("draw")]
    between = len(pipeline.diffusion_model.scheduler.steps) - 1
    chunks = pipeline.rollout(
        image=plan.framing.image, height=plan.framing.height, width=plan.framing.width,
        num_chunk=kept["noise"].shape[2] // 3,
        noise=GivenNoise(kept["noise"], parity.draws_by_step(draws, lambda chunk: between)),
        control=controls(plan.pipeline.encoder, kept["keyboard"][0], kept["mouse"][0] if "mouse" in kept else None),
    )  # fmt: skip
    frames = torch.cat([chunk.frames for chunk in chunks])
    return parity.verdict(parity.compare(frames, kept["frames"]), arguments.threshold)


def controls(encoder: Any, keyboard: Tensor, mouse: Tensor | None) -> list[Any]:
    """Rows of the original, keys ``[F, n]`` and pitch and yaw ``[F, 2]``, as our controls."""
    from flashdreams.core.controls import Control, Keys, Mouse

    names = {action.key: action.words[0] for action in encoder.actions if action.key is not None}
    rows = []
    for frame, row in enumerate(keyboard):
        pitch, yaw = (0.0, 0.0) if mouse is None else mouse[frame].tolist()
        moved = None if mouse is None else Mouse(dx=yaw, dy=-pitch)
        rows.append(Control(keys=Keys(*(names[int(key)] for key in row.nonzero())), mouse=moved))
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""Train the built-in model from nothing, stage by stage; every stage resumes from its checkpoint.

    python -m tiny_world.train                          the whole chain: about three hours on two cores
    python -m tiny_world.train --stage base --minutes 60   one stage (a longer plan goes on where a shorter ended)

To train the packaged weights further, without any earlier checkpoint:

    python -m tiny_world.train --from-package --stage encode
    python -m tiny_world.train --from-package --stage base --minutes 60
    python -m tiny_world.train --stage export
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MINUTES = {"codec": 23.0, "encode": 0.0, "base": 128.0, "distill": 26.0, "decoder": 12.0, "export": 0.0}
CHAIN = ("codec", "encode", "base", "distill", "decoder", "export")
"""What made the packaged weights."""


def run_stage(stage: str, out: Path, minutes: float, shards: int, weights: Path, workers: int) -> None:
    """Run one stage, or return at once if its result exists and no time is left in its plan."""
    from tiny_world.train import parallel
    from tiny_world.train.codec import train_codec
    from tiny_world.train.distill import train_distilled
    from tiny_world.train.dit import train_base
    from tiny_world.train.export import export
    from tiny_world.train.latents import encode_shards

    if stage in ("codec", "decoder"):
        parallel.run(workers, train_codec, out, minutes, stage == "decoder")
    elif stage == "encode":
        parallel.run(workers, encode_shards, out, shards)
    elif stage == "distill":
        parallel.run(workers, train_distilled, out, minutes)
    elif stage == "export":
        print(json.dumps(export(out, weights), indent=2))
    else:
        parallel.run(workers, train_base, out, minutes)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tiny_world.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=("all", *MINUTES), default="all")
    parser.add_argument("--minutes", type=float, help="wall-clock time of the stage, or of the whole chain")
    parser.add_argument("--out", type=Path, default=Path("outputs/tiny_world"), help="checkpoints, latents and logs")
    parser.add_argument("--weights", type=Path, default=Path(__file__).parents[1] / "weights", help="for export")
    parser.add_argument("--from-package", action="store_true", help="start from the weights in the package")
    parser.add_argument("--shards", type=int, default=16, help="of 50 long and 300 short clips each")
    parser.add_argument("--workers", type=int, default=2, help="one-thread processes that share their gradients")
    args = parser.parse_args()
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes is {args.minutes}; expected a positive number")
    import torch

    torch.set_num_threads(1 if args.workers > 1 else torch.get_num_threads())
    planned = sum(MINUTES[stage] for stage in CHAIN)
    scale = (args.minutes or planned) / planned
    stages = CHAIN if args.stage == "all" else (args.stage,)
    if args.from_package:
        from tiny_world.train.export import unpack

        unpack(args.weights, args.out)
        stages = tuple(stage for stage in stages if stage != "codec")
    for stage in stages:
        minutes = MINUTES[stage] * scale if args.stage == "all" else (args.minutes or MINUTES[stage])
        run_stage(stage, args.out, minutes, args.shards, args.weights, args.workers)


if __name__ == "__main__":
    main()

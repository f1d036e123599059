"""``flashdreams train``: reinforcement training of a model by a reward. Torch is imported for the training alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flashdreams.infra.errors import UserError
from flashdreams.plugins.registry import discover_rewards, get_reward, get_runner
from flashdreams.posttrain.config import TrainConfig
from flashdreams.scripts.console import Parser, columns
from flashdreams.scripts.run import configured, take_apart

ALGORITHMS = {
    "grpo": "Policy gradient on the log-probabilities of steps that draw noise (Flow-GRPO).",
    "nft": "The flow is drawn to good samples and away from bad ones (DiffusionNFT).",
}


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams train grpo|nft <slug> --reward NAME --output DIR [--flags]``."""
    if not words or words[0] not in ALGORITHMS:
        if words and words[0] not in ("-h", "--help"):
            raise UserError(f"there is no algorithm {words[0]!r}; there are {', '.join(ALGORITHMS)}")
        print(_overview(program))
        return 0 if words else 2
    algorithm = words[0]
    parser = _parser(algorithm, f"{program} {algorithm}")
    given, rest = parser.parse_known_args(list(words[1:]))
    settings = {name: value for name, value in vars(given).items() if value is not None}
    slug, reward, folder, resume = (settings.pop(name, None) for name in ("slug", "reward", "output", "resume"))
    config = TrainConfig(algorithm=algorithm, **settings)  # ty: ignore[invalid-argument-type]
    config.validate()
    line = take_apart([slug, *rest])
    if line.switches or line.replay:
        raise UserError(f"{parser.prog} takes no --replay and no --no-instantiate; `{parser.prog} --help` says more")
    runner: Any = configured(get_runner(slug), line)
    if runner.lora:
        raise UserError(
            "a LoRA goes in before training only as part of the weights; see `flashdreams checkpoint merge`"
        )
    return _train(config, runner, get_reward(reward).setup(), folder, resume=bool(resume))


def _train(config: TrainConfig, runner: Any, reward: Any, folder: Path, *, resume: bool) -> int:
    from flashdreams.core.checkpoint import CheckpointError
    from flashdreams.posttrain.trainer import Trainer

    plan = runner.setup().plan()
    try:
        pipeline = plan.pipeline.setup(device=plan.device)
        trainer = Trainer(config, pipeline, reward, folder, resume=resume, say=_say)
        files = trainer.run()
    except (CheckpointError, ValueError) as error:
        raise UserError(str(error)) from error
    for file in files:
        print(file)
    return 0


def _say(kind: str, iteration: int, values: dict[str, float]) -> None:
    """One line for people on stderr."""
    seconds = {"sample_seconds", "update_seconds"}
    shown = " ".join(f"{name} {value:.4g}" for name, value in values.items() if name not in seconds)
    print(f"{kind} {iteration}: {shown}", file=sys.stderr, flush=True)


def _overview(program: str) -> str:
    rewards = columns((name, entry.description()) for name, entry in discover_rewards().items())
    return (
        f"usage: {program} grpo|nft <slug> --reward NAME --output DIR [--flags]\n\n{columns(ALGORITHMS.items())}\n\n"
        f"rewards:\n{rewards}\n\n`{program} grpo --help` lists the flags."
    )


def _parser(algorithm: str, program: str) -> Parser:
    """Flags of :class:`TrainConfig`; its defaults stand where none is given."""
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    parser = Parser(
        prog=program,
        description=f"{ALGORITHMS[algorithm]} Other flags are those of `flashdreams-run <slug>`, such as --device.",
    )
    parser.add_argument("slug", metavar="SLUG", help="the model (see `flashdreams list`)")
    parser.add_argument("--reward", required=True, metavar="NAME", help="judge of the videos")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="LoRA, metrics, videos, state")
    parser.add_argument("--resume", action="store_true", help="go on with what DIR holds")

    def flag(group: Any, name: str, kind: Any, text: str, **options: Any) -> None:
        default = defaults[name]
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        metavar = {int: "N", float: "X", Path: "FILE"}.get(kind)
        suffix = "" if default is None else f" [{shown}]"
        group.add_argument(
            "--" + name.replace("_", "-"), type=kind, help=text + suffix,
            **({"metavar": metavar} if metavar and "choices" not in options else {}) | options,
        )  # fmt: skip

    samples = parser.add_argument_group("samples")
    flag(samples, "iterations", int, "of the whole training")
    flag(samples, "groups", int, "prompts of an iteration")
    flag(samples, "group_size", int, "samples of each, compared with one another")
    flag(samples, "batch", int, "samples rolled out at once")
    flag(samples, "num_chunk", int, "length of a sample")
    flag(samples, "first_chunk", int, "the first one trained; those before are a group's beginning")
    flag(samples, "prompts", Path, "training prompts, one per line; the reward's by default")
    flag(samples, "seed", int, "of noise, prompts and the LoRA's first values")
    learning = parser.add_argument_group("learning")
    flag(learning, "method", str, "what is trained", choices=("lora", "full"))
    flag(learning, "rank", int, "of the LoRA")
    flag(learning, "lr", float, "learning rate of AdamW")
    flag(learning, "max_grad_norm", float, "a longer gradient is shortened to it")
    flag(learning, "updates", int, "steps of the optimiser on the same samples")
    if algorithm == "grpo":
        flag(learning, "steps", int, "denoising steps that draw noise and are trained", nargs="+")
        flag(learning, "kernel", str, "how they draw it, if the model's sampler draws none", metavar="NAME")
        flag(learning, "eta", float, "how much of it")
        flag(learning, "clip", float, "range of the ratio")
    else:
        flag(learning, "sigmas", float, "noise levels that are trained", nargs="+")
        flag(learning, "beta", float, "distance of the positive and the negative flow from the old one")
    measuring = parser.add_argument_group("measuring, on held-out prompts")
    flag(measuring, "eval_every", int, "iterations between; 0: before and after only")
    flag(measuring, "eval_samples", int, "rollouts")
    flag(measuring, "eval_chunks", int, "length of them")
    flag(measuring, "eval_prompts", Path, "prompts, one per line; the reward's by default")
    flag(measuring, "videos", int, "of them that are written")
    flag(measuring, "save_every", int, "iterations between states on disk")
    return parser

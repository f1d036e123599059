"""``flashdreams bench``: times of the parts of a run, beside a bound measured in the same process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashdreams.infra.errors import UserError
from flashdreams.scripts.bench_flags import BENCHES, parser_of
from flashdreams.scripts.console import columns, warn


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams bench WHAT ...``"""
    if not words or words[0] in ("-h", "--help"):
        table = columns((name, text) for name, text in BENCHES.items())
        print(f"usage: {program} <what> [--flags]\n\n{table}\n\n`{program} <what> --help` says more.")
        return 0
    what, *rest = words
    if what not in BENCHES:
        raise UserError(f"there is no benchmark {what!r}; there are {', '.join(BENCHES)}")
    try:
        options = parser_of(what, f"{program} {what}").parse_args(rest)
    except SystemExit:  # how argparse ends after a help page
        return 0
    earlier = None if options.compare is None else _earlier(options.compare)
    try:
        report = _measure(what, options)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from None
    data = report.to_dict()
    if earlier is not None:
        data["compared"] = _compared(report, earlier, options.compare)
    text = json.dumps(data, indent=2)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    print(text if options.json else report.table())
    if earlier is not None and not options.json:
        ratios = data["compared"]["ratios"].items()
        print(f"\ntime over that in {options.compare}")
        print(columns((name, f"{ratio:.3f}") for name, ratio in ratios))
    return 0


def _measure(what: str, options: argparse.Namespace) -> Any:
    import torch

    from flashdreams.acceleration.bench.report import Report, machine
    from flashdreams.acceleration.bench.sampling import Plan
    from flashdreams.infra.load import resolve_device

    options.device = resolve_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = machine(options.device)  # before this process makes the machine busy
    entries, facts = _MEASURES[what](options, Plan(options.repeat, options.warmup))
    beside = ("json", "output", "compare", "dump", "save_inputs")
    settings = {name: _plain(value) for name, value in vars(options).items() if name not in beside}
    return Report(what, settings, tuple(entries), found, facts)


def _step(options: argparse.Namespace, plan: Any) -> Any:
    from flashdreams.acceleration.bench.step import measure_step
    from flashdreams.scripts.bench_models import step_config

    config, tokens = step_config(options)
    return measure_step(
        config, tokens=tokens, device=options.device, modes=_modes(options), plan=plan, seed=options.seed
    )


def _rollout(options: argparse.Namespace, plan: Any) -> Any:
    from flashdreams.acceleration.bench.inputs import random_inputs, read_inputs, write_inputs
    from flashdreams.acceleration.bench.rollout import measure_rollout
    from flashdreams.scripts.bench_models import rollout_config, rollout_sizes

    sizes = rollout_sizes(options)
    inputs = read_inputs(options.inputs, sizes) if options.inputs else random_inputs(sizes, options.seed)
    if options.save_inputs:
        write_inputs(inputs, options.save_inputs)
    pipeline = rollout_config(options).setup(device=options.device)
    return measure_rollout(pipeline, inputs, chunks=options.chunks, modes=_modes(options), plan=plan, dump=options.dump)


def _vae(options: argparse.Namespace, plan: Any) -> Any:
    from flashdreams.acceleration.bench.codec import measure_codec
    from flashdreams.scripts.bench_models import codec_config

    config, channels = codec_config(options)
    latent = channels, options.frames_per_chunk, options.latent_h, options.latent_w
    return measure_codec(
        config, latent, device=options.device, modes=_modes(options), plan=plan, seed=options.seed,
        layouts=("contiguous", "channels last") if options.channels_last else ("contiguous",),
    )  # fmt: skip


def _load(options: argparse.Namespace, plan: Any) -> Any:
    from flashdreams.acceleration.bench.loading import measure_load
    from flashdreams.plugins.registry import get_runner

    return measure_load(get_runner(options.slug).pipeline, device=options.device, plan=plan)


def _startup(options: argparse.Namespace, plan: Any) -> Any:
    from flashdreams.acceleration.bench.startup import measure_startup

    mode = "on" if options.compile else "off"
    return measure_startup(options.slug, device=options.device, compile=mode, plan=plan)


def _attention(options: argparse.Namespace, plan: Any) -> Any:
    from flashdreams.acceleration.bench.kernels import measure_attention

    sizes = options.queries, options.keys, options.heads, options.head_dim
    return measure_attention(*sizes, dtype=options.dtype, device=options.device, plan=plan, seed=options.seed)


_MEASURES: dict[str, Callable[[argparse.Namespace, Any], Any]] = {
    "rollout": _rollout, "step": _step, "vae": _vae, "load": _load, "startup": _startup, "attention": _attention,
}  # fmt: skip


def _modes(options: argparse.Namespace) -> list[str]:
    """Both, unless one is named."""
    both = options.eager == options.compile
    return [mode for mode, asked in (("eager", options.eager), ("compiled", options.compile)) if asked or both]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _earlier(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--compare {path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"--compare {path} is no report of `flashdreams bench`")
    return data


def _compared(report: Any, earlier: dict[str, Any], path: Path) -> dict[str, Any]:
    from flashdreams.acceleration.bench.report import compare

    try:
        ratios, notes = compare(report, earlier)
    except ValueError as error:
        raise UserError(f"--compare {path}: {error}") from None
    for note in notes:
        warn(note)
    return {"file": str(path), "ratios": ratios, "notes": notes}

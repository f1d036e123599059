"""``flashdreams plan``: what a model needs and how fast it can be, before anything is downloaded."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from flashdreams.infra.errors import UserError
from flashdreams.plugins.registry import discover_runners, get_runner
from flashdreams.scripts.console import Parser, columns

GIB = 2**30
STORED = ("int8", "fp8")


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams plan SLUG ...``; refuses no size, and warns of what will not fit."""
    parser = Parser(prog=program, description="Memory, work and speed of a model, from its config alone.")
    parser.add_argument("slug", nargs="?", metavar="SLUG", help="the model (see `flashdreams list`)")
    parser.add_argument("--all", action="store_true", help="a line for every model at its own size")
    parser.add_argument("--height", type=int, metavar="N", help="pixels [the model's own]")
    parser.add_argument("--width", type=int, metavar="N", help="pixels [the model's own]")
    parser.add_argument("--num-frames", type=int, metavar="N", help="length, for a model that makes one clip")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"), help="with weights in eight bits")
    parser.add_argument("--kv-dtype", default="model", choices=("model", *STORED), help="with keys and values so")
    parser.add_argument("--device", default="h100", metavar="NAME", help="h100 (default), cpu (this one), ...")
    parser.add_argument("--json", action="store_true", help="for programs")
    try:
        options = parser.parse_args(list(words))
    except SystemExit:  # how argparse ends after a help page
        return 0
    if options.all == bool(options.slug):
        raise UserError(f"name one model or give --all; `{program} --help` says more")
    device = _device(options.device)
    slugs = list(discover_runners()) if options.all else [options.slug]
    plans = []
    for slug in slugs:
        try:
            plan = _plan(slug, options)
        except UserError as error:
            if not options.all:
                raise
            print(f"{slug:34} {error}", file=sys.stderr, flush=True)
            continue
        plans.append(plan)
        if options.all and not options.json:
            print(_line(plan, device), flush=True)
    if options.json:
        print(json.dumps([_facts(plan, device) for plan in plans], indent=2))
    elif not options.all:
        print(_page(plans[0], device))
        from flashdreams.infra.number_formats import slow_formats

        if slow := slow_formats(get_runner(options.slug).pipeline, options.device):
            print(f"\nNote: {slow}")
    return 0


def _device(name: str) -> Any:
    from flashdreams.acceleration.devices import DEVICES, this_cpu

    if name == "cpu":
        return this_cpu()
    if name not in DEVICES:
        raise UserError(f"--device is {name!r}; expected one of {', '.join([*DEVICES, 'cpu'])}")
    return DEVICES[name]


def _plan(slug: str, options: Any) -> Any:
    from flashdreams.acceleration.plan import plan_model
    from flashdreams.infra.acceleration_config import AccelerationConfig

    config = get_runner(slug).pipeline
    size = {"height": options.height, "width": options.width, "num_frames": options.num_frames}
    acceleration = AccelerationConfig(quantize=options.quantize, kv_dtype=options.kv_dtype)
    try:
        return plan_model(config, **size, acceleration=acceleration)
    except ValueError as error:
        raise UserError(str(error)) from None


def _fps(rate: float) -> str:
    return f"{rate:.2f} FPS" if rate >= 1 else f"{rate:.2g} FPS"


def _seconds(plan: Any, device: Any) -> dict[str, float]:
    """Of each phase of a chunk, at the device's whole matrix rate."""
    transformer = next(part for part in plan.parts if part.name.startswith("transformer"))
    decoder = next((part for part in plan.parts if part.name == "decoder"), transformer)
    rates = {"decode": device.rate(decoder.dtype)}
    return {name: flops / rates.get(name, device.rate(transformer.dtype)) for name, flops in plan.flops.items()}


def _facts(plan: Any, device: Any) -> dict[str, Any]:
    from flashdreams.acceleration.devices import SHARE

    seconds = _seconds(plan, device)
    bound = sum(seconds.values())
    return dataclasses.asdict(plan) | {
        "device": device.name,
        "weights": plan.weights,
        "peak": plan.peak,
        "peak_offloaded": plan.peak_offloaded,
        "total_flops": plan.total_flops,
        "seconds_at_the_full_rate": seconds,
        "fps_at_the_full_rate": plan.frames / bound,
        "fps_expected": SHARE * plan.frames / bound,
        "fits": plan.peak <= device.memory * GIB,
    }


def _line(plan: Any, device: Any) -> str:
    facts, room = _facts(plan, device), device.memory * GIB
    verdict = "" if facts["fits"] else "  does not fit" if plan.peak_offloaded > room else "  with offload"
    work = f"{plan.total_flops / 1e12:10,.2f} TFLOP  {plan.peak / GIB:6.1f} GiB"
    fps = f"{facts['fps_at_the_full_rate']:8.2f} FPS at most"
    return f"{plan.name:34} {plan.height:4}x{plan.width:<5} {plan.frames:3} frames a chunk  {work}  {fps}{verdict}"


def _page(plan: Any, device: Any) -> str:
    from flashdreams.acceleration.devices import SHARE

    seconds, facts = _seconds(plan, device), _facts(plan, device)
    shape = f"window {plan.window}" if plan.window else "one clip"
    lines = [
        f"{plan.name}: {plan.height}x{plan.width}, {plan.latent_frames} latent = {plan.frames} frames a chunk, "
        f"{shape}, {plan.steps} steps", "",
        "memory", columns((part.name, _part(part)) for part in plan.parts),
        columns([
            ("a rollout", _gib(plan.state)),
            *((f"while it {_DOES[name]}", "+ " + _gib(size)) for name, size in plan.transient.items()),
            ("peak", f"{_gib(plan.peak)} of {device.memory:.0f} GiB"),
            ("peak, blocks offloaded", _gib(plan.peak_offloaded)),
        ]), "",
        "work per chunk",
        columns(
            (name, f"{flops / 1e12:12,.3f} TFLOP  {1000 * seconds[name]:10,.1f} ms at the full rate")
            for name, flops in plan.flops.items() if flops
        ),
        columns((kind, f"{100 * flops / max(1, plan.total_flops):.0f} %") for kind, flops in plan.kinds.items()), "",
        f"speed on {device.title}",
        columns([
            ("plays at", f"{plan.fps:.2f} FPS"),
            ("at most", f"{_fps(facts['fps_at_the_full_rate'])}, every product at the full rate"),
            ("expected", f"{_fps(facts['fps_expected'])}, {100 * SHARE:.0f} % of that, as well-tuned runtimes reach"),
        ]),
    ]  # fmt: skip
    if not facts["fits"]:
        fits = plan.peak_offloaded <= device.memory * GIB
        lines.append(
            f"\nIt does not fit {device.title} {'unless blocks are offloaded' if fits else 'even with offload'}."
        )
    return "\n".join(lines)


_DOES = {
    "control": "encodes controls", "denoise": "denoises", "commit": "commits",
    "commit+step": "commits within a first step", "decode": "decodes",
}  # fmt: skip


def _part(part: Any) -> str:
    away = "" if part.resident else "  (not there while chunks are made)"
    return f"{_gib(part.weights)}  {part.parameters:,} parameters in {part.dtype}{away}"


def _gib(size: int) -> str:
    return f"{size / GIB:8.3f} GiB"

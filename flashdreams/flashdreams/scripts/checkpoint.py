"""``flashdreams checkpoint``: what is in a file of weights, whether it fits a model, and files made from others.

Torch is imported by the commands, not by their help.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from flashdreams.config.fields import nearest
from flashdreams.infra.errors import UserError
from flashdreams.scripts.console import Parser, columns

_HEADERS, _TENSORS = "flashdreams.scripts.checkpoint_headers", "flashdreams.scripts.checkpoint_tensors"
ACTIONS = {
    "inspect": (_HEADERS, "What is in it: files, number formats, keys and shapes (remote too, from headers alone)."),
    "diff": (_HEADERS, "Keys, shapes and number formats in which two checkpoints differ."),
    "verify": (_HEADERS, "Whether every key and shape fits a model (or a manifest), before any weight is read."),
    "suggest": (_HEADERS, "Propose the rules that rename a checkpoint's keys to a model's."),
    "equal": (_TENSORS, "Largest difference of two checkpoints, tensor by tensor, in a model's own layout."),
    "convert": (_TENSORS, "Write a checkpoint in another layout, number format or shard size."),
    "merge-lora": (_TENSORS, "Write a checkpoint with LoRAs merged into it."),
}
_SOURCE = "file, folder, org/repo, hf://org/repo[/path][@revision], or link"
_MANIFEST = f"{_SOURCE}; or a manifest (.json, .json.gz) of keys and shapes"


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams checkpoint <action> ...``. Exit code 0: yes, 1: no or different, 2: a mistake."""
    if not words or words[0] in ("-h", "--help"):
        actions = columns((name, text) for name, (_, text) in ACTIONS.items())
        print(f"usage: {program} <action> ...\n\n{actions}\n\n`{program} <action> --help` says more.")
        return 0
    name = words[0]
    if name not in ACTIONS:
        hint = nearest(name, ACTIONS) or f"; there are {', '.join(ACTIONS)}"
        raise UserError(f"there is no action {name!r} of {program}{hint}")
    parser = _parser(name, f"{program} {name}")
    try:
        options = parser.parse_args(list(words[1:]))
    except SystemExit:  # how argparse ends after a help page
        return 0
    from flashdreams.core.checkpoint import CheckpointError

    module, _ = ACTIONS[name]
    try:
        return getattr(importlib.import_module(module), name.replace("-", "_"))(options)
    except CheckpointError as error:
        raise UserError(str(error)) from None


def _parser(name: str, program: str) -> argparse.ArgumentParser:
    parser = Parser(prog=program, description=ACTIONS[name][1])
    _FLAGS[name](parser)
    return parser


def _model(parser: Any, *, flag: bool = True, required: bool = False) -> None:
    if flag:
        parser.add_argument("--model", metavar="SLUG", required=required, help="the model (see `flashdreams list`)")
    parser.add_argument(
        "--part", default="transformer", metavar="NAME",
        help="transformer (default), transformer.0 for the first expert, text_encoder, image_encoder, encoder, decoder",
    )  # fmt: skip
    parser.add_argument(
        "--transform", metavar="MODULE:NAME",
        help="function or key map that renames keys (found from the header among those the model declares)",
    )  # fmt: skip


def _output(parser: Any) -> None:
    parser.add_argument("--output", required=True, metavar="FILE", help="the .safetensors file to write")
    parser.add_argument("--shard-size", metavar="SIZE", help="write numbered files of at most this size, such as 5GB")


def _inspect(parser: Any) -> None:
    parser.add_argument("source", metavar="SOURCE", help=_MANIFEST)
    parser.add_argument("--keys", action="store_true", help="every key, not only the patterns they follow")
    parser.add_argument("--json", action="store_true", help="for programs; in the format of a manifest")


def _diff(parser: Any) -> None:
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help=_MANIFEST)


def _verify(parser: Any) -> None:
    parser.usage = f"{parser.prog} SLUG SOURCE [--part NAME] [--transform MODULE:NAME]\n       " + (
        f"{parser.prog} SLUG --manifest FILE\n       {parser.prog} SOURCE --manifest FILE"
    )
    parser.add_argument("words", nargs="+", metavar="SLUG SOURCE", help=f"a model and a checkpoint ({_SOURCE})")
    parser.add_argument("--manifest", metavar="FILE", help="keys and shapes to hold the model or the source against")
    _model(parser, flag=False)


def _suggest(parser: Any) -> None:
    parser.add_argument("model", metavar="MODEL", help="a slug (see `flashdreams list`), or what SOURCE may be")
    parser.add_argument("source", metavar="SOURCE", help=_MANIFEST)
    parser.add_argument("--hint", action="append", default=[], metavar="THEIRS=OURS", help="what a name is called here")
    parser.add_argument("--output", metavar="FILE", help="write the key map as Python source, for a plugin")
    _model(parser, flag=False)


def _equal(parser: Any) -> None:
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help=_SOURCE)
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="largest |d| that is equal [0]")
    _model(parser)


def _convert(parser: Any) -> None:
    parser.add_argument("source", metavar="SOURCE", help=_SOURCE)
    parser.add_argument("--to", metavar="LAYOUT", help="native, or another layout of the model, such as diffusers")
    parser.add_argument("--dtype", metavar="NAME", help="number format of floating-point tensors, such as bfloat16")
    _output(parser)
    _model(parser)


def _merge_lora(parser: Any) -> None:
    parser.add_argument("source", metavar="BASE", help=_SOURCE)
    parser.add_argument("loras", nargs="+", metavar="LORA[:WEIGHT]", help="LoRAs, each with its weight [1]")
    _output(parser)
    _model(parser)


_FLAGS = {
    "inspect": _inspect,
    "diff": _diff,
    "verify": _verify,
    "suggest": _suggest,
    "equal": _equal,
    "convert": _convert,
    "merge-lora": _merge_lora,
}

"""The help page of a runner: what a person sets for a run, and one line for each part of the model. No torch here."""

from __future__ import annotations

import textwrap
from collections import Counter

from flashdreams.infra.config import RunnerConfig
from flashdreams.scripts.console import columns
from flashdreams.scripts.flags import Flag, FlagGroup, flags_of

GENERAL_FLAGS = {
    "--compile [MODE]": "Compile the model: on, off, or auto, which is on a GPU only.",
    "--profile [FILE]": "Print the phases of each chunk; FILE.json: a trace as well.",
    "--config FILE": "Start from a YAML file, such as --no-instantiate prints.",
    "--replay FILE": "Repeat the run of a run record (the .json beside a video).",
    "--no-instantiate": "Print the config that the flags make, as YAML, and stop.",
    "--help-all": "Every flag, also those of the model, with its documentation.",
}
GENERAL_NAMES = [name.split()[0] for name in (*GENERAL_FLAGS, "--help")]


def general_help() -> str:
    """The flags that every runner has, as text."""
    return columns(GENERAL_FLAGS.items())


def runner_help(config: RunnerConfig, program: str) -> str:
    """The page of ``<program> <slug> --help``."""
    group = flags_of(config)
    example = next((flag for flag in group.all_flags() if flag.path.endswith("transformer.guidance_scale")), None)
    inner_groups = [inner for inner in group.all_groups() if inner.flags]
    common = Counter(name for inner in inner_groups for name in inner.flags)
    return "\n".join(
        [
            f"usage: {program} {config.runner_name} [--flags]",
            "",
            config.description,
            "",
            columns((_term(flag), _text(flag)) for flag in group.flags.values()),
            "",
            general_help(),
            "",
            "The model's own config" + (f", for example {example.name} 3:" if example else ":"),
            columns(((_prefix(inner), _names(inner, common)) for inner in inner_groups), limit=60, wrap=False),
        ]
    )


def _term(flag: Flag) -> str:
    if flag.annotation is bool:
        return flag.name
    return f"{flag.name} {flag.metavar if len(flag.metavar) <= 12 else 'NAME'}"


def _text(flag: Flag) -> str:
    """The beginning of its documentation, whole sentences of it, and its default where that says something."""
    text, *sentences = flag.doc.split(". ")
    for sentence in sentences:
        if len(text) + len(sentence) > 84:
            break
        text = f"{text}. {sentence}"
    if len(flag.metavar) > 12:
        text = f"{text.rstrip('.')}: {flag.metavar.strip('{}').replace(',', ', ')}"
    default = (
        "" if flag.value in (None, "", False, ()) else f" [{textwrap.shorten(str(flag.value), 60, placeholder='...')}]"
    )
    return text.rstrip(".") + default


def _prefix(group: FlagGroup) -> str:
    return f"--{group.path.replace('_', '-')}. ..."


def _names(group: FlagGroup, common: Counter[str]) -> str:
    """How many flags it has, and their names, what is its own before what most parts have."""
    names = sorted(group.flags, key=lambda name: common[name] > 2)
    count = f"{len(names)} flag{'s' * (len(names) > 1)}"
    return f"{count}: {', '.join(name.replace('_', '-') for name in names)}"

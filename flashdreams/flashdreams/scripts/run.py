"""``flashdreams-run``: lists the runners, explains one, or runs it. Torch is imported for the run alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashdreams.config import ConfigError, apply_yaml, derive_config, to_yaml
from flashdreams.infra.config import RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.plugins.registry import get_runner
from flashdreams.scripts.command_line import apply_flags, parse_seed, print_help
from flashdreams.scripts.console import guarded, warn, write_file
from flashdreams.scripts.listing import listed_runners, table
from flashdreams.scripts.recording import RunRecord, differences, read_record, read_text
from flashdreams.scripts.short_flags import expand
from flashdreams.scripts.usage import GENERAL_NAMES, general_help, runner_help


def main() -> int:
    """Entry point of the program."""
    return guarded(lambda: run(sys.argv[1:], "flashdreams-run"))


@dataclass
class Line:
    """A command line, taken apart."""

    slug: str | None = None
    config: Path | None = None
    replay: Path | None = None
    switches: set[str] = field(default_factory=set)
    """Of ``--help``, ``--help-all`` and ``--no-instantiate``, those that are given."""
    flags: list[str] = field(default_factory=list)
    """What is the runner's own."""


def run(words: Sequence[str], program: str) -> int:
    """``flashdreams-run [<slug>] [--flags]``."""
    line = take_apart(words)
    record = read_record(line.replay) if line.replay else None
    slug = line.slug or (record.slug if record else None)
    if slug is None:
        if line.flags or line.config or "--no-instantiate" in line.switches:
            raise UserError(
                f"which runner? Its name comes first: {program} <slug> [--flags]; {program} alone lists them"
            )
        print(_overview(program))
        return 0
    config: RunnerConfig = get_runner(slug)
    if "--help" in line.switches:
        print(runner_help(config, program))
        return 0
    if "--help-all" in line.switches:
        print_help(config, f"{program} {slug}", f"{config.description}\n\n{general_help()}")
        return 0
    config = configured(config, line, record)
    if "--no-instantiate" in line.switches:
        write_file(to_yaml(config))
        return 0
    return _run(config, record)


def take_apart(words: Sequence[str]) -> Line:
    """Our own flags may stand anywhere; the first other word is the slug; the rest is the runner's."""
    line = Line()
    files: dict[str, Path] = {}
    rest = iter(expand(words))
    for word in rest:
        if not _is_text(word):
            raise UserError(f"{word!r} is not valid UTF-8, which a run record could not hold")
        name, equals, value = word.partition("=")
        name = {"-h": "--help"}.get(name, name.replace("_", "-") if name.startswith("--") else name)
        if name in ("--help", "--help-all", "--no-instantiate") and not equals:
            line.switches.add(name)
        elif name in ("--config", "--replay"):
            value = value if equals else next(rest, "")
            if not value or (value.startswith("--") and not equals):
                raise UserError(f"{name} needs the name of a file")
            if name in files:
                raise UserError(f"{name} is given twice")
            files[name] = Path(value)
        elif line.slug is None and not line.flags and not word.startswith("-"):
            line.slug = word
        else:
            line.flags.append(word)
    if len(files) == 2:
        raise UserError("--config and --replay both say where to start from; give one of them")
    line.config, line.replay = files.get("--config"), files.get("--replay")
    return line


def configured(config: RunnerConfig, line: Line, record: RunRecord | None = None) -> RunnerConfig:
    """The runner's config as the command line has it, checked as far as no torch is needed."""
    changed = apply_flags(config, line.flags, known=GENERAL_NAMES)
    if line.config or record:  # it may repeat the functions that the flags name, and choose no others
        changed = apply_flags(_start(changed, line.config, record), line.flags, known=GENERAL_NAMES)
    _check(changed)
    return changed


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # bytes that the shell passed on and Python could not decode
        return False
    return True


def _overview(program: str) -> str:
    runners = table(listed_runners())
    usage = f"usage: {program} <slug> [--flags]\n       {program} <slug> --help"
    return f"{usage}\n\n{runners}\n\n{general_help()}"


def _start(config: RunnerConfig, file: Path | None, record: RunRecord | None) -> RunnerConfig:
    """The runner's config as the file or the record has it."""
    if record is not None:
        if record.slug != config.runner_name:
            raise UserError(f"{record.path} records a run of {record.slug!r}, not of {config.runner_name!r}")
        return record.apply(config)
    if file is None:
        return config
    try:
        changed = apply_yaml(config, read_text(file, "--config"))
    except ConfigError as error:
        raise UserError(f"--config {file}: {error}") from None
    if changed.runner_name != config.runner_name:
        raise UserError(f"--config {file} is for {changed.runner_name!r}, not for {config.runner_name!r}")
    return changed


def _check(config: RunnerConfig) -> None:
    """Refuse what the runner would, before anything heavy is imported."""
    config.validate_tree()
    if config.seed is not None:
        parse_seed(str(config.seed))
    if config.guidance_scale is not None:
        transformer = config.pipeline.diffusion_model.transformer
        derive_config(transformer, guidance_scale=config.guidance_scale).validate()


def _run(config: RunnerConfig, record: RunRecord | None) -> int:
    runner: Any = config.setup()
    if record is not None:
        from flashdreams.infra.load import resolve_device
        from flashdreams.infra.record import environment

        _say_differences(record, differences(record.environment, environment(resolve_device(config.device))))
    output = runner.run()
    if record is not None:
        made = read_record(Path(output).with_suffix(".json"))
        _say_differences(record, differences(record.checkpoint, made.checkpoint))
        _say_differences(record, differences(record.inputs, made.inputs))
    return 0


def _say_differences(record: RunRecord, found: list[str]) -> None:
    if found:
        warn(f"this is not the run of {record.path}, so the video may differ; {'; '.join(found)}")


if __name__ == "__main__":
    sys.exit(main())

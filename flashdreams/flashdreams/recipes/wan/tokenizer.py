"""From a prompt to umT5's token ids: cleaning as published, and the tokenizer of the checkpoint's folder."""

from __future__ import annotations

import html
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.digest import file_digest
from flashdreams.core.checkpoint.hub import download, list_files
from flashdreams.core.checkpoint.sources import HubSource, LocalSource, RandomSource, ZeroSource, parse_source
from flashdreams.core.notices import say_once

NAME = "tokenizer.json"
FOLDERS = ("", "google/umt5-xxl", "tokenizer")
"""Where the published repositories have it: beside the weights, in the native ones, in those of diffusers."""

WITHOUT = "give saved embeddings instead of a prompt (--prompt-embeds FILE)"
"""What a person without a tokenizer can do."""

PAD, END = 0, 1
"""Token ids that every T5 has in these places."""


def clean_prompt(text: str) -> str:
    """Repair broken characters (with ftfy), resolve HTML entities twice, and make every run of white space a blank."""
    try:
        import ftfy
    except ImportError:
        if not text.isascii():
            say_once(
                "ftfy is not installed: characters such as typographic quotes reach the text encoder unrepaired, which "
                "the model was not trained with; pip install 'flashdreams[text]' repairs them"
            )
    else:
        text = ftfy.fix_text(text)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


def load_tokenizer(place: str, vocab_size: int) -> Any:
    """The ``tokenizers.Tokenizer`` found at ``place``: a ``tokenizer.json``, or a folder, repository or checkpoint file
    that has one beside it.

    Raises:
        CheckpointError: there is none, it is no T5 tokenizer, or the package that reads it is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CheckpointError(
            "the text encoder needs the package 'tokenizers', which is not installed; pip install 'flashdreams[text]', "
            f"or {WITHOUT}"
        ) from None
    path = find_tokenizer(place)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what the package raises is a bare Exception
        raise CheckpointError(f"{path} is not a tokenizer ({error}); download it again") from None
    ends, size = [tokenizer.token_to_id(name) for name in ("<pad>", "</s>")], tokenizer.get_vocab_size()
    if ends != [PAD, END] or size > vocab_size:
        raise CheckpointError(
            f"{path} is the tokenizer of another model: its <pad> and </s> are {ends[0]} and {ends[1]}, of {size} "
            f"tokens; expected {PAD} and {END}, of at most {vocab_size}"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def identity(place: str | None) -> tuple[str, ...]:
    """What the token ids of a prompt depend on: the tokenizer's digest, and the versions of what reads and cleans text.

    Raises:
        CheckpointError: there is no tokenizer.
    """
    if place is None:
        raise CheckpointError(f"this text encoder has neither weights nor a tokenizer; {WITHOUT}")
    versions = []
    for package in ("tokenizers", "ftfy"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return (file_digest(find_tokenizer(place)), *versions)


def find_tokenizer(place: str) -> Path:
    """The local ``tokenizer.json`` at or near ``place``, downloaded if ``place`` is on the hub.

    Raises:
        CheckpointError: there is none.
    """
    source = parse_source(place)
    if isinstance(source, RandomSource | ZeroSource):
        raise CheckpointError(f"{place} has no tokenizer; set the text encoder's tokenizer to a {NAME}, or {WITHOUT}")
    path = source.path if isinstance(source, LocalSource) else PurePosixPath(source.path)
    around = (path, path.parent, path.parent.parent)
    names = [path] if path.suffix == ".json" else [base / folder / NAME for base in around for folder in FOLDERS]
    names = list(dict.fromkeys(names))
    listing = list_files(source.repo, source.revision) if isinstance(source, HubSource) else Path()
    if isinstance(listing, Path):
        found = next((listing / name for name in names if (listing / name).is_file()), None)
    else:
        name = next((str(name) for name in names if str(name) in listing.files), None)
        found = download(listing, [name])[0] if name else None
    if found is None:
        looked = ", ".join(map(str, names))
        raise CheckpointError(
            f"no {NAME} for the text encoder at {place} (looked for {looked}); set the text encoder's tokenizer to "
            f"one, or {WITHOUT}"
        )
    return found

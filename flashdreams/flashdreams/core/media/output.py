"""Whether a file can be written at all: asked before the long work that would fill it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flashdreams.core.media import MediaError


def check_output(path: Path, suffix: str) -> list[Path]:
    """Make the folders of ``path`` and try to open it, leaving an existing file as it is and no new one behind.

    Args:
        suffix: the ending the file must have, such as ``.mp4``.

    Returns:
        The folders that were made, innermost first; :func:`remove_folders` undoes it.

    Raises:
        MediaError: no file can be written there, or its name does not end in ``suffix``.
    """
    made: list[Path] = []
    try:
        # The file a link points to, also one that is not there yet: the probe below must not remove the link.
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise MediaError(f"output {str(path)!r} is a folder; name a file in it, such as {path / ('clip' + suffix)}")
        if path.suffix.lower() != suffix:
            raise MediaError(f"output {str(path)!r} does not end in {suffix}; give a name such as 'clip{suffix}'")
        if target.exists() and not target.is_file():
            raise MediaError(f"output {str(path)!r} is a device or pipe; give the name of an ordinary file")
        missing = [folder for folder in target.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.insert(0, folder)
        existed = target.exists()
        with target.open("ab"):
            pass
        if not existed:
            target.unlink()
    except (OSError, ValueError) as error:
        remove_folders(made)
        if isinstance(error, MediaError):
            raise
        raise MediaError(
            f"output {str(path)!r} cannot be written: {reason(error)}; choose another place or name"
        ) from None
    return made


def remove_folders(folders: list[Path]) -> None:
    """Remove ``folders``, innermost first, as far as they are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def reason(error: Exception) -> str:
    """What went wrong, in the words of the system and without its numbers."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

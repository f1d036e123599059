"""Give every in-tree pyproject.toml the version of flashdreams/_version.py: ``python .ci/sync_version.py [--check]``.

Exits with 1 if a version differed, also after writing it, so that a commit hook stops once and shows the change.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION_LINE = re.compile(r'^version = "(.*)"$', re.MULTILINE)


def main() -> int:
    source = (ROOT / "flashdreams/flashdreams/_version.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert version is not None, "_version.py has no __version__ line"
    stale = 0
    for path in (ROOT / "pyproject.toml", *sorted(ROOT.glob("integrations/*/pyproject.toml"))):
        text = path.read_text()
        found = VERSION_LINE.search(text)
        if found is None:
            print(f'{path.relative_to(ROOT)} has no `version = "..."` line; add one')
        elif found.group(1) != version.group(1):
            print(f"{path.relative_to(ROOT)} says {found.group(1)}, flashdreams is {version.group(1)}")
            if "--check" not in sys.argv:
                path.write_text(VERSION_LINE.sub(f'version = "{version.group(1)}"', text, count=1))
        else:
            continue
        stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

"""Evaluate golden files: does this implementation give the numbers of the public originals?

    python tests/goldens/run.py FILE...

prints ``name  max|d|  tolerance  ok`` per file and exits with 1 if any fails. What a file is, is read from its
metadata, never from its name; a value passes if ``|d| <= tolerance + 1e-4 * |expected|`` (1e-12 each in float64).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from cases import find
from golden import Comparison, Golden, compare, load


def evaluate(golden: Golden) -> Comparison:
    """Run a case and compare.

    Raises:
        LookupError: nothing here knows how to run this case.
    """
    run = find(golden)
    with torch.inference_mode():
        return compare(golden, run(golden))


def report(path: Path) -> tuple[bool, str]:
    """Whether a file passes, and the line to print."""
    try:
        golden = load(path)
        result = evaluate(golden)
    except Exception as error:  # one bad file must not hide the others
        return False, f"{path.stem:36} FAIL: {type(error).__name__}: {error}"
    verdict = "FAIL: " + "; ".join(result.problems) if result.problems else "ok"
    return not result.problems, f"{golden.name:36} {result.difference:9.2e} {golden.atol:10.0e}  {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare this implementation with golden files.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a golden .safetensors file")
    passed = []
    print(f"{'name':36} {'max|d|':>9} {'tolerance':>10}")
    for path in parser.parse_args(arguments).files:
        ok, line = report(path)
        passed.append(ok)
        print(line, flush=True)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())

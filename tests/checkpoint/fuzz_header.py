"""Random damage to checkpoint files: one clear error each, or a file that the format's own library accepts too.

    python tests/checkpoint/fuzz_header.py --cases 1000000 --minutes 30

runs until both are reached (``--seed`` starts elsewhere) and prints what it found; the exit status is 1 if anything.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.header import BITS, Header, header_length, parse_header
from flashdreams.core.checkpoint.layout import read_index

DTYPES = [name for name, bits in BITS.items() if bits >= 8]
ODD: list[Any] = [
    -1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 1.0, 1e400, -0.0, True, None, "", "F32", "f32", "é", "\ud800",
    "\0", [], {}, [[]], [1], [0, 0], [-1], [2**40, 2**40], [1.5], ["1"], [None], {"a": 1}, [0] * 70,
]  # fmt: skip


@dataclass
class Findings:
    """Outcomes by name, and the first case of each thing that must not happen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, int] = field(default_factory=dict)

    def note(self, what: str, case: int) -> None:
        self.wrong.setdefault(what, case)


def valid(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """A header and its data."""
    table: dict[str, Any] = {}
    if rng.random() < 0.3:
        table["__metadata__"] = {f"k{i}": "v" * rng.randrange(9) for i in range(rng.randrange(3))}
    end = 0
    for number in range(rng.randrange(6)):
        dtype = rng.choice(DTYPES)
        shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
        size = BITS[dtype] // 8
        for length in shape:
            size *= length
        table[f"blocks.{number}.w" + "x" * rng.randrange(3)] = {
            "dtype": dtype, "shape": shape, "data_offsets": [end, end + size],
        }  # fmt: skip
        end += size
    return table, rng.randbytes(end)


def encode(table: Any, data: bytes, rng: random.Random) -> bytes:
    text = json.dumps(table, allow_nan=True).encode()
    text += b" " * rng.choice((0, 0, -len(text) % 8, rng.randrange(20)))
    return len(text).to_bytes(8, "little") + text + data


def in_the_table(table: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One entry, or one of its fields, replaced, dropped, doubled, exchanged or shifted."""
    names = [name for name in table if name != "__metadata__"]
    if not names:
        return {rng.choice(["a", "__metadata__", ""]): rng.choice(ODD)}
    entry = table[rng.choice(names)]
    kind = rng.randrange(8)
    if kind == 0:
        entry[rng.choice(["dtype", "shape", "data_offsets", "more"])] = rng.choice(ODD)
    elif kind == 1:
        del entry[rng.choice(list(entry))]
    elif kind == 2:
        other = table[rng.choice(names)]
        entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
    elif kind == 3:
        entry["data_offsets"] = [value + rng.choice([-9, -1, 1, 2, 8, 10**9]) for value in entry["data_offsets"]]
    elif kind == 4:
        entry["dtype"] = rng.choice([*BITS, "F128", "int4", "NF4"])
    elif kind == 5:
        entry["shape"] = entry["shape"] + [rng.choice(ODD)]
    elif kind == 6:
        table[rng.choice(names)] = rng.choice(ODD)
    else:
        table["__metadata__"] = rng.choice(ODD)
    return table


def in_the_bytes(whole: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, doubled, overwritten or spliced; lengths that lie; constructs that JSON allows or half allows."""
    kind = rng.randrange(12)
    at = rng.randrange(len(whole) + 1)
    if kind == 0:
        return whole[:at]
    if kind == 1:
        return whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :]
    if kind == 2:
        return whole[:at] + rng.randbytes(rng.randrange(1, 9)) + whole[at:]
    if kind == 3:
        return whole[:at] + whole[at + rng.randrange(1, 9) :]
    if kind == 4:
        claim = rng.choice([0, 1, 7, len(whole), 2**31, 10**10, 2**63, 2**64 - 1, rng.randrange(400)])
        return claim.to_bytes(8, "little") + whole[8:]
    if kind == 5:
        return whole + rng.randbytes(rng.randrange(1, 20))
    if kind == 6:
        return whole.replace(b'"F32"', b'"F16"').replace(b"[0,", b"[00,", rng.randrange(2))
    length = int.from_bytes(whole[:8], "little")
    text, data = whole[8 : 8 + length], whole[8 + length :]
    if kind == 7 and b"blocks.0" in text and b"blocks.1" in text:
        text = text.replace(b"blocks.1", b"blocks.0")
    elif kind == 8:
        text = rng.choice(
            [b"[" * 3000, b'{"a":' * 3000, b"\xef\xbb\xbf" + text, text.decode("latin-1").encode("utf-16"), b"null"]
        )
    elif kind == 9:
        text = text.replace(
            b'"shape"', rng.choice([b'"shape" : null, "shape"', b'"\\u0073hape"', b'"shape\\ud800"']), 1
        )
    elif kind == 10:
        text = rng.choice([b" ", b"\n", b"\0", b"{}"]) + text
    else:
        text += rng.choice([b"\0", b"}", b" ", b"\n", b",", b"/**/"])
    return len(text).to_bytes(8, "little") + text + data


def damaged(rng: random.Random) -> bytes:
    table, data = valid(rng)
    roll = rng.random()
    if roll < 0.45:
        table = in_the_table(table, rng)
    whole = encode(table, data, rng)
    return in_the_bytes(whole, rng) if 0.4 < roll < 0.95 else whole


def parsed(whole: bytes) -> Header:
    length = header_length(whole[:8], len(whole), "case")
    return parse_header(whole[8 : 8 + length], len(whole), "case")


def check(whole: bytes, case: int, findings: Findings) -> None:
    problem = ""
    try:
        header = parsed(whole)
    except CheckpointError as error:
        findings.outcomes["refused"] += 1
        header, problem = None, re.sub(r"'[^']*'|\d+", "_", str(error).partition("file: ")[2])[:60]
    except Exception as error:
        findings.note(f"{type(error).__name__} instead of a CheckpointError", case)
        return
    try:
        reference = dict(safetensors.deserialize(whole))
    except Exception:
        reference = None
    if header is None:
        if reference is not None:
            findings.outcomes[f"refused, though the library reads it: {problem}"] += 1
        return
    findings.outcomes["read"] += 1
    if reference is None:
        findings.note("read, though the library refuses it", case)
    elif header.tensors.keys() != reference.keys():
        findings.note("other keys than the library's", case)
    elif any(list(info.shape) != reference[key]["shape"] for key, info in header.tensors.items()):
        findings.note("other shapes than the library's", case)
    elif any(whole[info.start : info.stop] != bytes(reference[key]["data"]) for key, info in header.tensors.items()):
        findings.note("other bytes than the library's", case)


def check_index(rng: random.Random, case: int, findings: Findings) -> None:
    """The index of shards, in place of a header."""
    shards = ["a.bin", "b.pt"] if rng.random() < 0.5 else ["a.bin", "../a.bin", "/a.bin", "..\\a.bin", "b", *ODD]
    content: Any = {"weight_map": {f"k{i}": rng.choice(shards) for i in range(4)}}
    if rng.random() < 0.2:
        content = rng.choice([*ODD, {"weight_map": rng.choice(ODD)}])
    text = json.dumps(content).encode()
    if rng.random() < 0.5:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.randbytes(rng.randrange(3)) + text[at + rng.randrange(3) :]
    try:
        table = read_index(text, "case")
    except CheckpointError:
        findings.outcomes["index refused"] += 1
    except Exception as error:
        findings.note(f"index: {type(error).__name__} instead of a CheckpointError", case)
    else:
        findings.outcomes["index read"] += 1
        if any("/" in shard or "\\" in shard for shard in table.values()):
            findings.note("index: a shard outside the folder", case)


def check_load(folder: Path) -> Callable[[bytes, random.Random, int, Findings], None]:
    """A check of whole files: loaded into a module, which stays as it was on any error."""
    import torch
    from safetensors.torch import save

    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from flashdreams.core.checkpoint import load_checkpoint
    from small_model import meta_model, same, untouched, weights

    state = weights()
    whole, pickled = save(state), folder / "whole.pt"
    torch.save({"model": state}, pickled)
    sources = [whole, whole, pickled.read_bytes()]

    def check(small: bytes, rng: random.Random, case: int, findings: Findings) -> None:
        file = folder / rng.choice(["w.safetensors", "w.pt"])
        file.write_bytes(rng.choice([small, in_the_bytes(rng.choice(sources), rng), rng.choice(sources)]))
        module = meta_model()
        try:
            load_checkpoint(module, str(file))
        except CheckpointError:
            findings.outcomes["load refused"] += 1
            if not untouched(module):
                findings.note("load: a module left half-filled", case)
        except Exception as error:
            findings.note(f"load: {type(error).__name__} instead of a CheckpointError", case)
        else:
            findings.outcomes["loaded"] += 1
            findings.outcomes["loaded, with damage in the values"] += not same(module, state)

    return check


def fuzz(cases: int, minutes: float = 0, seed: int = 0, every: int = 500) -> tuple[int, Findings]:
    """At least ``cases`` cases and ``minutes``; one in ``every`` is also loaded from a file."""
    findings, end, case = Findings(), time.monotonic() + 60 * minutes, seed
    with tempfile.TemporaryDirectory() as folder:
        load = check_load(Path(folder))
        while case - seed < cases or time.monotonic() < end:
            rng = random.Random(case)
            whole = damaged(rng)
            check(whole, case, findings)
            if case % 10 == 0:
                check_index(rng, case, findings)
            if case % every == 0:
                load(whole, rng, case, findings)
            case += 1
    return case - seed, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    faulthandler.enable()
    begun = time.monotonic()
    count, findings = fuzz(words.cases, words.minutes, words.seed)
    print(f"{count} cases from seed {words.seed} in {(time.monotonic() - begun) / 60:.1f} minutes")
    for name, number in findings.outcomes.most_common():
        print(f"  {number:9d} {name}")
    for name, case in findings.wrong.items():
        print(f"  WRONG, first in case {case}: {name}")
    return bool(findings.wrong)


if __name__ == "__main__":
    sys.exit(main())

"""Peak memory and time of loading a model of 1.42 billion parameters (the defaults of the DiT's config), in bf16.

    python tests/checkpoint/memory.py [--layers 30] [--repeat 2] [--folder DIR] [--dtypes bfloat16]

Each line is a fresh process that loads, then touches every page of every weight. Memory is the kernel's high-water mark
of resident pages, anonymous and file-backed together; the share of the interpreter and its libraries is what was
resident before the load ("less interp." leaves it out). Ratios are to the size of the weights in their final format,
and to the time, by the clock and of the processor, of the two plain ways in the same run. "bare" is the least that any
program with PyTorch can have: it imports torch and touches every byte of the files, with no tensor and no code of ours.
Needs 9 GB of disk meanwhile.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

DTYPES = ("bfloat16", "float32")
WAYS = ("ours", "plain", "assign")
BARE = "bare"


def resident(field: str) -> int:
    """Bytes of this process by the kernel's account: ``VmRSS`` now, ``VmHWM`` at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(field)


def build(layers: int):
    from flashdreams.core.checkpoint.meta import parameters_on_meta
    from flashdreams.recipes.wan.config import WanNetworkConfig

    with parameters_on_meta():
        return WanNetworkConfig(num_layers=layers).setup()


def touch(module) -> None:
    import torch

    for value in module.state_dict().values():
        value.view(-1).view(torch.uint8)[::4096].sum()


def make(folder: Path, layers: int) -> None:
    """The same random weights as one file, as four shards with their index, and as a file of torch.save."""
    import torch
    from safetensors.torch import save_file

    from flashdreams.core.checkpoint import load_checkpoint

    module = build(layers)
    load_checkpoint(module, "random:0", dtype=torch.bfloat16)
    state = module.state_dict()
    save_file(state, folder / "one.safetensors")
    torch.save(dict(state), folder / "one.pth")
    shards = folder / "shards"
    shards.mkdir()
    table, keys = {}, list(state)
    for number in range(4):
        name = f"m-{number + 1:05d}-of-00004.safetensors"
        part = keys[number * len(keys) // 4 : (number + 1) * len(keys) // 4]
        save_file({key: state[key] for key in part}, shards / name)
        table |= dict.fromkeys(part, name)
    (shards / "m.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def read_plainly(path: Path) -> dict:
    import torch
    from safetensors.torch import load_file

    if path.suffix == ".pth":
        return torch.load(path, map_location="cpu", weights_only=True)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {key: value for file in files for key, value in load_file(file).items()}


def bare(path: Path) -> None:
    """Only torch, and every page of the files."""
    import torch  # noqa: F401

    before, begun, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    kept = []
    for file in files:
        with file.open("rb") as opened:
            kept.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        for place in range(0, len(kept[-1]), mmap.PAGESIZE):
            kept[-1][place]
    row = {
        "before": before,
        "peak": resident("VmHWM"),
        "size": sum(map(len, kept)),
        "load": time.perf_counter() - begun,
    }
    print(json.dumps(row | {"seconds": row["load"], "cpu": time.process_time() - cpu}))


def child(way: str, path: Path, dtype_name: str, layers: int) -> None:
    """One measurement, as a line of JSON."""
    if way == BARE:
        bare(path)
        return
    import torch
    from safetensors.torch import load_file  # noqa: F401 (its import is not part of the time)

    from flashdreams.core.checkpoint import load_checkpoint

    dtype = getattr(torch, dtype_name)
    module = build(layers)
    size = sum(value.numel() for value in module.parameters()) * dtype.itemsize
    before = resident("VmRSS")
    if way == "plain":
        module.to(dtype).to_empty(device="cpu")
    begun, cpu = time.perf_counter(), time.process_time()
    if way == "ours":
        load_checkpoint(module, str(path), dtype=dtype)
    elif way == "plain":
        module.load_state_dict(read_plainly(path))
    else:
        state = {key: value.to(dtype) for key, value in read_plainly(path).items()}
        module.load_state_dict(state, assign=True)
        del state
    loaded = time.perf_counter() - begun
    touch(module)
    row = {"before": before, "peak": resident("VmHWM"), "size": size, "load": loaded}
    print(json.dumps(row | {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}))


def measure(folder: Path, layers: int, repeat: int, dtypes: Sequence[str]) -> list[dict]:
    """Every source and format by every way; the best time and the highest peak of ``repeat``, taken in turns."""
    table = []
    for name in ("one.safetensors", "shards", "one.pth"):
        for dtype in dtypes:
            best: dict[str, dict] = {}
            for _ in range(repeat):
                for way in (*WAYS, BARE) if dtype == "bfloat16" else WAYS:
                    words = [sys.executable, __file__, "--child", way, str(folder / name), dtype, str(layers)]
                    done = subprocess.run(words, capture_output=True, text=True, check=True)
                    row = json.loads(done.stdout.splitlines()[-1])
                    seen = best.setdefault(way, row)
                    for field in ("load", "seconds", "cpu"):
                        seen[field] = min(seen[field], row[field])
                    seen["peak"] = max(seen["peak"], row["peak"])
            for way, row in best.items():
                added = (row["peak"] - row["before"]) / row["size"]
                ratios = {
                    f"{field}/{other}": row[field] / best[other][field]
                    for field in ("seconds", "cpu")
                    for other in ("plain", "assign")
                }
                table.append({"source": name, "dtype": dtype, "way": way, "added": added, **row, **ratios})
    return table


def show(table: list[dict], repeat: int) -> None:
    head = (
        "peak GB",
        "/weights",
        "less interp.",
        "load s",
        "+touch s",
        "/plain",
        "/assign",
        "CPU s",
        "/plain",
        "/assign",
    )
    print(f"{table[0]['size'] / 2e9:.3f} billion parameters, stored in bf16; best of {repeat}")
    print(f"{'source':16}{'to':10}{'way':7}" + "".join(f"{name:>13}" for name in head))
    for row in table:
        numbers = [row["peak"] / 1e9, row["peak"] / row["size"], row["added"], row["load"], row["seconds"]]
        numbers += [row["seconds/plain"], row["seconds/assign"], row["cpu"], row["cpu/plain"], row["cpu/assign"]]
        print(f"{row['source']:16}{row['dtype']:10}{row['way']:7}" + "".join(f"{number:13.3f}" for number in numbers))


def run(layers: int, repeat: int, folder: str | None = None, dtypes: Sequence[str] = DTYPES) -> list[dict]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        subprocess.run([sys.executable, __file__, "--make", place, str(layers)], check=True)
        table = measure(Path(place), layers, repeat, dtypes)
    show(table, repeat)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--folder")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        way, path, dtype, layers = words.child
        child(way, Path(path), dtype, int(layers))
    elif words.make:
        make(Path(words.make[0]), int(words.make[1]))
    else:
        run(words.layers, words.repeat, words.folder, words.dtypes)


if __name__ == "__main__":
    main()

"""Fuzz what reads a model folder with atheris, target by target: `make fuzz`.

    python scripts/fuzz.py [--runs 1010000] [--targets config weights] [--keep] [--record]

Each target runs in a process of its own, which the first finding ends; the input is left in the folder that is named
and is run again by `--replay FILE TARGET`. `--keep` puts the smallest input of each way in which one was accepted or
refused into tests/scripts/fuzzed.zip, from where a test runs them without atheris and the next run starts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "tests" / "scripts" / "fuzzed.zip"
SHARE = {"sums": 0.29, "config": 0.33, "weights": 0.29, "vocabulary": 0.07, "folder": 0.02}
"""Of all executions: a full load takes a hundred times as long as a line of sums."""
LARGEST = 16_384
LEAST = 1_000_000
MOST_KEPT = 100
"""Inputs of a target, the first of as many ways."""
INSTRUMENTED = [
    "scdiva.models.storage", "scdiva.models.pretrained", "scdiva.models.config", "scdiva._checks",
    "scdiva.tokenizer.vocabulary",
    "scdiva.tokenizer.names", "json",
]  # fmt: skip


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 4, 7, 12, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 10**20, 10**400, 1e308,
    5e-324, 0.5, 1.0, -0.0, math.nan, math.inf, "", "x", "F32", "F64", "F16", "BF16", "I64", "F8_E4M3", "F8_E5M2",
    "F4", "C64", "BOOL", "U8", "learned", "pooled", "none", "scdiva", "../../etc/passwd", "__class__", "\ud800", "\0",
    "é" * 40, "a" * 3000, [], {}, [0], [[]], {"": {}}, [0, 2**63], ["a", 1], [{"a": 1}], [None],
)  # fmt: skip
ODD_NAMES = (b"", b"|", b"a|b||a", b"\0", b" ", b"ENSG00000000003", b"A.B", b"a" * 5000, b"\r", b"\n")


# mutations that keep the format: half of all; the others are libFuzzer's own, of bytes


def tree(value: Any, draw: random.Random) -> Any:
    """A JSON value with something in it changed."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or draw.random() < 0.1:
        if isinstance(value, int | float) and draw.random() < 0.3 and -(2**64) < value < 2**64:
            return draw.choice([value + 1, value - 1, -value, value * 2, value * 1.0, str(value), [value]])
        return draw.choice(ODD)
    key, copy, what = draw.choice(inner), value.copy(), draw.random()
    if what < 0.75:
        copy[key] = tree(value[key], draw)
    elif what < 0.85:
        del copy[key]
    elif isinstance(copy, dict):
        copy[draw.choice(("", "x", f"{key} ", "__metadata__", "__proto__", "\ud800"))] = copy[key]
    else:
        copy.insert(key, draw.choice(ODD))
    return copy


def text(data: bytes, draw: random.Random) -> bytes | None:
    """JSON as bytes with something in it changed; None if it is not JSON."""
    try:
        value = json.loads(data)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            value = tree(value, draw)
        return json.dumps(value, ensure_ascii=draw.random() < 0.8).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError, OverflowError):
        return b"[" * draw.choice((10, 5000, 100_000)) if draw.random() < 0.01 else None


def header(data: bytes, draw: random.Random) -> bytes | None:
    """A changed safetensors header of the length that it states, over the same, shorter or longer numbers."""
    size = int.from_bytes(data[:8], "little")
    changed_header = text(data[8 : 8 + size], draw) if size <= len(data) else None
    if changed_header is None:
        return None
    numbers = data[8 + size :]
    if draw.random() < 0.3:
        at = draw.randrange(len(numbers) + 1)
        odd = draw.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", b"\xff" * 8, b"\x00" * 64))
        numbers = draw.choice((numbers[:at], numbers + odd, numbers[:at] + odd + numbers[at + len(odd) :]))
    return len(changed_header).to_bytes(8, "little") + changed_header + numbers


def tensors(data: bytes, draw: random.Random) -> bytes | None:
    """A tensor dropped, of another type or shape, or with a value or a name changed; None if it cannot be read."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load, save

    try:
        arrays = load(data)
        name, what = draw.choice(sorted(arrays)), draw.random()
        array = arrays[name].copy()
        if what < 0.1:
            del arrays[name]
        elif what < 0.3:
            arrays[name] = array.astype(draw.choice(("uint8", "float16", "float32", "float64", "int64", "bool")))
        elif what < 0.4:
            arrays[name] = array.reshape(1, -1)
        elif array.dtype == np.uint8:  # names, one a line
            names = array.tobytes().split(b"\n")
            names[draw.randrange(len(names))] = draw.choice((*ODD_NAMES, names[0]))
            arrays[name] = np.frombuffer(b"\n".join(draw.choice((names, names[1:], names * 2))), np.uint8)
        else:
            array.flat[draw.randrange(array.size)] = draw.choice((0, 1, 3, math.nan, math.inf, -1.0, 3e38))
            arrays[name] = array
        return save(arrays)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError):
        return None


CHANGES = {"sums": (), "config": (text,), "weights": (header, header, tensors), "vocabulary": (header, tensors)}


def changed(target: str, data: bytes, draw: random.Random) -> bytes | None:
    """An input of a target changed within its format; None if it has lost the format."""
    if target == "folder":
        kind = ("config", "weights", "vocabulary", "sums", "sums")[data[0] % 5] if data else "sums"
        inner = changed(kind, data[1:], draw)
        return None if inner is None else data[:1] + inner
    return draw.choice(CHANGES[target])(data, draw) if CHANGES[target] else None


# runs


def child(target: str, runs: int, seed: int, folder: Path) -> None:
    """Fuzz one target; what happened is written to the folder as it goes on. Never returns."""
    import atheris
    import torch

    torch.set_num_threads(1)
    with atheris.instrument_imports(include=INSTRUMENTED):
        import json.decoder
        import json.scanner  # noqa: F401

        import scdiva.models.pretrained
        import scdiva.tokenizer.vocabulary  # noqa: F401
    from fuzz_targets import Finding, Place, judge

    place = Place(folder)
    seeds = folder / "seeds"
    seeds.mkdir()
    whole = starts(place, target)
    for i, data in enumerate([*whole, *kept(target)]):
        (seeds / str(i)).write_bytes(data)
    said: dict[str, Any] = {"runs": 0, "accepted": 0, "refused": 0, "slowest": 0.0}
    found: dict[tuple[bool, str], bytes] = {}
    begun = time.monotonic()

    def one(data: bytes) -> None:
        start = time.perf_counter()
        said["runs"] += 1
        try:
            outcome = judge(target, place, data)
        except Finding as finding:
            write(folder, said | {"finding": str(finding), "seconds": time.monotonic() - begun}, found)
            (folder / "finding").write_bytes(data)
            raise
        said["accepted" if outcome.accepted else "refused"] += 1
        said["slowest"] = max(said["slowest"], time.perf_counter() - start)
        if outcome not in found or len(found[outcome]) > len(data):
            found[outcome] = data
        if said["runs"] % 1000 == 0 or said["runs"] >= runs:
            write(folder, said | {"ways": len(found), "seconds": time.monotonic() - begun}, found)

    def mutate(data: bytes, largest: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.3:  # what has lost its format is refused at the door ever after
            data = draw.choice(whole)
        new = changed(target, data, draw) if draw.random() < 0.5 else None
        if new is None or len(new) > largest:
            new = atheris.Mutate(data, largest)
            if target == "weights" and len(new) >= 8 and draw.random() < 0.5:  # the header's length as it was
                new = data[:8] + new[8:]
        elif draw.random() < 0.2:
            new = atheris.Mutate(new, largest)
        return new

    # No crossing over: it would call the mutator with halves of two files.
    arguments = [sys.argv[0], str(seeds), f"-runs={runs}", f"-seed={seed}", f"-max_len={LARGEST}", "-timeout=60",
                 "-rss_limit_mb=3000", f"-artifact_prefix={folder}/", "-verbosity=0", "-len_control=0"]  # fmt: skip
    atheris.Setup(arguments, one, custom_mutator=mutate, enable_python_coverage=True)
    atheris.Fuzz()


def write(folder: Path, said: dict, found: dict) -> None:
    """Leave what happened so far, and the smallest input of each way."""
    (folder / "said.json").write_text(json.dumps(said))
    inputs = folder / "found"
    inputs.mkdir(exist_ok=True)
    for i, (outcome, data) in enumerate(found.items()):
        (inputs / f"{'accepted' if outcome.accepted else 'refused'}-{i:03}").write_bytes(data)


def starts(place: Any, target: str) -> list[bytes]:
    """The whole files."""
    from fuzz_targets import KINDS

    one = dict(zip(("config", "weights", "vocabulary", "sums"), KINDS, strict=False))
    if target in one:
        return [place.whole[one[target]]]
    return [bytes([i]) + place.whole[name] for i, name in enumerate(KINDS)]


def kept(target: str) -> list[bytes]:
    """Inputs of former runs."""
    if not KEPT.exists():
        return []
    with zipfile.ZipFile(KEPT) as file:
        return [file.read(name) for name in sorted(file.namelist()) if name.startswith(f"{target}/")]


def keep(target: str, inputs: Path) -> None:
    """Put inputs in the place of those kept for a target, but for former findings. Equal inputs give equal bytes."""
    old = {}
    if KEPT.exists():
        with zipfile.ZipFile(KEPT) as file:
            others = (
                name for name in file.namelist() if not name.startswith((f"{target}/accepted", f"{target}/refused"))
            )
            old = {name: file.read(name) for name in others}
    new = {f"{target}/{path.name}": path.read_bytes() for path in sorted(inputs.iterdir())[:MOST_KEPT]}
    with zipfile.ZipFile(KEPT, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in sorted((old | new).items()):
            file.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


def fuzz(target: str, runs: int, seed: int, keeps: bool) -> dict[str, Any]:
    """Run a target in a child; give its row."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-", dir=shared if shared.is_dir() else None))
    order = [sys.executable, __file__, "--child", str(folder), "--targets", target, "--runs", str(runs),
             "--seed", str(seed)]  # fmt: skip
    with (folder / "log").open("wb") as log:
        code = subprocess.run(order, check=False, stdout=log, stderr=log).returncode
    file = folder / "said.json"
    said = json.loads(file.read_text()) if file.exists() else {"runs": 0, "accepted": 0, "refused": 0, "seconds": 0}
    whole = code == 0 and said["runs"] >= runs
    if whole:
        if keeps:
            keep(target, folder / "found")
        subprocess.run(["rm", "-r", str(folder)], check=True)
    else:
        said.setdefault("finding", f"the process ended with {code} after {said['runs']} of {runs} runs")
        print(f"{target}: {said['finding']}; what is left lies in {folder}", flush=True)
    executed = "done while loading" in said.get("finding", "")
    return {
        "what": target, "executions": said["runs"], "accepted": said["accepted"], "refused": said["refused"],
        "ways": said.get("ways", 0), "crashes": int(not whole and not executed), "executed": int(executed),
        "slowest_s": round(said.get("slowest", 0.0), 3), "seconds": round(said["seconds"]),
    }  # fmt: skip


def replay(path: Path, target: str) -> None:
    from fuzz_targets import Place, judge

    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        judge(target, place, starts(place, target)[0])
        print(judge(target, place, path.read_bytes()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1_010_000, help="executions of all targets together")
    parser.add_argument("--targets", nargs="+", choices=list(SHARE), default=list(SHARE))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/fuzz.json")
    parser.add_argument("--replay", type=Path, help="one input, of the one target that is named")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.targets[0], arguments.runs, arguments.seed, arguments.child)
    if arguments.replay:
        replay(arguments.replay, arguments.targets[0])
        return 0
    try:
        import atheris  # noqa: F401
    except ImportError as error:
        parser.error(f"atheris is not installed ({error}): pip install --group fuzz")
    rows = []
    for target in arguments.targets:
        runs = round(arguments.runs * SHARE[target])
        rows.append(fuzz(target, runs, arguments.seed, arguments.keep))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.record:
        sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
        from _record import PACKAGES, commit, goal, record, recorded_rows, replaced, versions

        new, rows = [{**row, "commit": commit()} for row in rows], recorded_rows("fuzz")
        for row in new:
            rows = replaced(rows, row, ("what",))
        rows.sort(key=lambda row: list(SHARE).index(row["what"]))
    total = {key: sum(row[key] for row in rows) for key in ("executions", "crashes", "executed")}
    print(", ".join(f"{key} = {value:,}" for key, value in total.items()))
    if arguments.record:
        judged = [
            goal("executions", total["executions"], at_least=LEAST, counted=True),
            goal("crashes, hangs and errors that name no file", total["crashes"], at_most=0, counted=True),
            goal("executions that ran code, wrote, or opened another file", total["executed"], at_most=0, counted=True),
        ]
        used = versions((*PACKAGES, "atheris", "safetensors"))
        record("fuzz", [*judged, *rows], seed=arguments.seed, versions=used)
    return int(bool(total["crashes"] or total["executed"]))


if __name__ == "__main__":
    sys.exit(main())

"""Fuzz what reads a model folder with atheris, target by target: `make fuzz`.

    python scripts/fuzz.py [--runs 1010000] [--targets config weights] [--keep] [--record]

Each target runs in a process of its own, which the first finding ends; the input is left in the folder that is named
and is run again by `--replay FILE TARGET`. `--keep` puts the smallest input of each way in which one was accepted or
refused into tests/scripts/fuzzed.zip, from where a test runs them without atheris and the next run starts.
"""

from __future__ import annotations

import argparse
import json
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
    "scdiva.models._folder", "scdiva.models.pretrained", "scdiva.models.config", "scdiva._checks",
    "scdiva.tokenizer.vocabulary", "scdiva.tokenizer._vocabulary_file",
    "scdiva.tokenizer.names", "json",
]  # fmt: skip


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
    from fuzz_mutate import changed
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
        from _record import PACKAGES, commit, record, replaced, rows_so_far, versions
        from _timing import goal

        new, rows = [{**row, "commit": commit()} for row in rows], rows_so_far("fuzz")
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

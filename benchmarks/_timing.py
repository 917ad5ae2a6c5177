"""Time arms in turns, compare them with goals, and measure peak memory."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from scdiva._settings import multiplies_bf16

DRAWS = 2000
KNOWN = ("what", "value", "at_least", "at_most", "met", "interval", "over")


def interleaved(
    arms: dict[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of every run of every arm, each arm once a round.

    A shared machine slows down for minutes, not for one call, so arms that take turns are equally affected; the first
    arm of a round changes from round to round. `process_time` counts the CPU time of all threads: set one thread.
    """
    if not arms or repeats < 1 or warmup < 0:
        raise ValueError(f"Time at least one arm, once: got {len(arms)} arms, repeats={repeats}, warmup={warmup}.")
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            arms[name]()
            spent = clock() - start
            if turn >= warmup:
                seconds[name].append(spent)
    return seconds


def goal(
    what: str,
    value: float,
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    interval: tuple[float, float] | None = None,
    over: str | None = None,
    counted: bool = False,
    **details: object,
) -> dict:
    """A row with a goal: `what`, `value`, one bound, `met` and details.

    `met` is True where the whole `interval` satisfies the bound, False where no part of it does, and None otherwise.
    Without an interval `met` is False or None: one run can miss a goal, but not show that it is met. `counted` values
    are exact and need no interval.
    """
    if (at_least is None) == (at_most is None):
        raise ValueError(f"{what}: a goal has one bound, at_least or at_most.")
    if not all(map(math.isfinite, (value, *(interval or ())))):
        raise ValueError(f"{what}: {value} is no measurement.")
    bound = {"at_least": at_least} if at_most is None else {"at_most": at_most}
    row: dict = {"what": what, "value": float(value), **bound}
    low, high = (value, value) if counted or interval is None else interval
    surely, possibly = (low, high) if at_least is not None else (-high, -low)
    limit = at_least if at_least is not None else -at_most  # type: ignore[operator]
    met = True if surely >= limit else None if possibly >= limit else False
    row["met"] = None if met and interval is None and not counted else met
    if counted:
        return {**row, "over": "counted", **details}
    if interval is not None:
        row["interval"] = [round(float(low), 5), round(float(high), 5)]
    return {**row, **({"over": over} if over else {}), **details}


def judge_times(
    what: str,
    times: Sequence[float],
    others: Sequence[float],
    *,
    scale: float = 1.0,
    at_least: float | None = None,
    at_most: float | None = None,
    **details: object,
) -> dict:
    """A goal on the ratio of two arms' best times, `scale` times, with a bootstrap interval over the rounds."""
    one, other = (np.asarray(some, dtype=float) for some in (times, others))
    value = scale * one.min() / other.min()
    if min(len(one), len(other)) < 2:
        return goal(what, value, at_least, at_most, **details)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(one), size=(DRAWS, len(one)))
    paired = drawn if len(one) == len(other) else rng.integers(len(other), size=(DRAWS, len(other)))
    ratios = scale * one[drawn].min(axis=1) / other[paired].min(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    rounds = f"{min(len(one), len(other))} rounds"
    return goal(what, value, at_least, at_most, interval=(low, high), over=rounds, **details)


def fast_here(arms: Iterable[str]) -> list[str]:
    """The arms that this CPU supports in hardware; without it bfloat16 takes up to 120 times as long as float32."""
    names = list(arms)
    slow = () if multiplies_bf16("cpu") else ("bf16", "bfloat16")
    omitted = [name for name in names if any(word in name for word in slow)]
    if omitted:
        print(f"not run: {', '.join(omitted)}; this CPU does not support it", flush=True)
    return [name for name in names if name not in omitted]


def verdict(row: dict) -> str:
    """A goal's row in words."""
    if row["met"] is False:
        return "missed"
    if "interval" in row:
        return "met" if row["met"] else "within noise"
    over = row.get("over") or "one run"
    return "met" if over == "counted" else f"{over}, no interval"


def report(rows: Iterable[dict]) -> int:
    """Print the rows; return how many goals were missed."""
    missed = 0
    for row in rows:
        line = str(row.get("what", ""))
        if "value" in row:
            line += f": {row['value']:.4g}"
        if "interval" in row:
            low, high = row["interval"]
            line += f" [{low:.4g}, {high:.4g}; {row['over']}]"
        if "met" in row:
            sign, bound = (">=", row["at_least"]) if "at_least" in row else ("<=", row["at_most"])
            line += f" (goal {sign} {bound:g}: {verdict(row).replace('missed', 'MISSED')})"
            missed += row["met"] is False
        rest = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in KNOWN
        )
        print(": ".join(part for part in (line, rest) if part), flush=True)
    return missed


def peak_bytes(work: Callable[[], object]) -> int:
    """Maximum bytes of tensors allocated during `work` on a CPU, from the profiler's record of torch's allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        if event["args"]["Device Type"] == 0:
            held += event["args"]["Bytes"]
            peak = max(peak, held)
    return peak


def resident(field: str = "VmHWM") -> int:
    """Resident bytes of this process: their maximum, or the present value with `"VmRSS"` (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

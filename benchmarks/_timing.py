"""Time arms side by side, compare with goals, print what came out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from scdiva._settings import multiplies_bf16


def interleaved(
    arms: dict[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of every run of every arm, each arm once a round.

    A machine that is shared or gets warm slows down for minutes, not for one call: arms that take turns suffer alike,
    and the first place of a round goes round as well. The caller takes `min` of each list, and ratios within one call
    only.

    `process_time` counts the CPU time of all threads: set one thread. On a GPU the arms must wait for the device
    themselves, or use its events instead of this function.
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
    """Make a row with a goal: `what`, `value`, the bound (one of the two), `met`, and details for the table.

    `met` is True where all of the `interval` (over the seeds, cells or rounds that `over` names) is on the good side of
    the bound, False where none of it is, and None within noise. Without an interval it is False beyond the bound and
    None at it: one run says that a goal is missed, not that it is met. What is `counted` or exact needs no interval.
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


def verdict(row: dict) -> str:
    """What a goal's row says in words."""
    if row["met"] is False:
        return "missed"
    if "interval" in row:
        return "met" if row["met"] else "within noise"
    over = row.get("over") or "one run"
    return "met" if over == "counted" else f"{over}, no interval"


KNOWN = ("what", "value", "at_least", "at_most", "met", "interval", "over")


def fast_here(arms: Iterable[str]) -> list[str]:
    """The arms that this CPU has the arithmetic for; what is left out is printed.

    Without it bfloat16 takes up to 120 times as long as float32.
    """
    names = list(arms)
    slow = () if multiplies_bf16("cpu") else ("bf16", "bfloat16")
    left = [name for name in names if any(word in name for word in slow)]
    if left:
        print(f"left out: {', '.join(left)}; this CPU has no arithmetic for it", flush=True)
    return [name for name in names if name not in left]


def report(rows: Iterable[dict]) -> int:
    """Print the rows; return how many goals were missed. A row without `met` has no goal and is only printed.

    A goal within noise, or of one run, is neither met nor missed: it is printed as such, and not counted.
    """
    missed = 0
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in KNOWN}
        line = f"{row.get('what', '')}"
        if "value" in row:
            line += f": {row['value']:.4g}"
        if "interval" in row:
            low, high = row["interval"]
            line += f" [{low:.4g}, {high:.4g}; {row['over']}]"
        if "met" in row:
            sign, bound = (">=", row["at_least"]) if "at_least" in row else ("<=", row["at_most"])
            said = verdict(row)
            line += f" (goal {sign} {bound:g}: {'MISSED' if said == 'missed' else said})"
            missed += row["met"] is False
        said = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in rest.items()
        )
        print(": ".join(part for part in (line, said) if part))
    return missed

"""Peak memory of a piece of work on a CPU, counted in two ways that share nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes of tensors that `work` held at once, above what was held when it began.

    From the profiler's record of every call to torch's CPU allocator, temporaries inside of operations included. What
    a library allocates by itself (oneDNN's repacked weights) is not in it; see :func:`resident_peak`.
    """
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


def resident_peak(work: Callable[[], object]) -> int:
    """Most resident bytes of this process during `work`, above those when it began (Linux).

    For a process of its own: what an earlier piece of work gave back to the allocator, but not to the system, would be
    missing here.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

"""Sections of benchmarks/gpu.py that fail; tests/scripts/test_gpu_once.py runs all of them at toy sizes."""

from __future__ import annotations

import os
import signal
import time


def crashes(setting):
    yield {"what": "before the crash", "value": 1.0}
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(setting):
    yield {"what": "before it hangs", "value": 1.0}
    time.sleep(60)


def raises(setting):
    yield {"what": "counted", "value": 1.0}
    yield {"what": "counted", "value": 2.0}
    raise ValueError("no such thing")


def works(setting):
    yield {"what": "ceiling", "matmul": 5.0, "plan": {"forward": [1]}}


def sees(setting):
    yield {"what": "found before", "value": setting.matmul, "launch": setting.plan}


def test_a_section_that_fails_loses_only_itself(script, monkeypatch):
    gpu = script("gpu")
    some = {"crashes": (crashes, 20), "hangs": (hangs, 0.7), "raises": (raises, 20), "works": (works, 20)}
    monkeypatch.setattr(gpu, "SECTIONS", {**some, "sees": (sees, 20)})
    written = []
    rows, failed = gpu.run_all(gpu.dry_setting(), gpu.SECTIONS, lambda *found: written.append(found))
    assert failed == 3
    found = {(row["section"], row["what"]): row for row in rows}
    assert len(found) == len(rows) < len(written), "written after each row; a later row replaces one of its name"
    assert found["crashes", "before the crash"]["value"] == found["hangs", "before it hangs"]["value"] == 1
    assert found["crashes", "section crashes"]["error"] == f"its process ended with {-signal.SIGKILL}"
    assert found["hangs", "section hangs"]["error"] == "cut off after its 1 s"
    assert found["raises", "section raises"]["error"] == "ValueError: no such thing"
    assert found["raises", "counted"]["value"] == 2
    assert found["sees", "found before"]["value"] == 5
    assert found["sees", "found before"]["launch"] == {"forward": [1]}
    assert written[0][1]["cores"] == os.cpu_count()

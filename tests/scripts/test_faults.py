"""`make faults` in short form: real processes, really killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHORTER = """
import sys
sys.path.insert(0, {scripts!r})
import faults
import scdiva.tokenizer._kernels  # numba, once for all that are forked

class Toy(faults.Toy):
    def __init__(self, wide):
        super().__init__(wide)
        self.steps = 7 if wide else 14

faults.Toy = Toy
sys.exit(faults.main())
"""


@pytest.mark.fault("SIGKILL in fit")
def test_nothing_is_lost_when_a_run_is_killed(tmp_path):
    code = SHORTER.format(scripts=str(SCRIPTS))
    order = [sys.executable, "-c", code, "--kills", "1", "--saves", "1", "--signals", "0", "--folder", str(tmp_path)]
    answer = subprocess.run(
        order, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    rows = {
        line[:24].strip(): [int(number) for number in line[24:].split()] for line in answer.stdout.splitlines()[-6:-1]
    }
    assert rows["SIGKILL in fit"] == [1, 1, 0]
    assert rows["SIGKILL in save"] == [1, 1, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_run_counts_as_no_match(script, tmp_path):
    """The judge itself: weights that differ in a bit, a broken file and steps that are gone are noticed."""
    import torch

    faults, runs = script("faults"), script("faults_runs")
    good = {"global_step": 4, "state_dict": {"w": torch.ones(3)}, "scdiva": {"batches_seen": 8}}
    other = {**good, "state_dict": {"w": torch.ones(3) + 2**-20}}
    assert runs.digest(good) != runs.digest(other)
    for content, done, expected in ((good, 5, (1, 1, 0)), (good, 9, (1, 1, 1)), (other, 5, (1, 0, 0))):
        trial = faults.Trial("test", None, {4: runs.digest(good)}, tmp_path)
        torch.save(content, tmp_path / "last.ckpt")
        trial.judge(done, 4)
        assert (trial.tried, trial.exact, trial.lost) == expected
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:300])
    trial.judge(5, 4)
    assert trial.lost == 1

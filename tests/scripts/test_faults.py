"""`make faults` in short form: real processes, really killed."""

from __future__ import annotations


def test_a_checkpoint_of_another_run_counts_as_no_match(script, tmp_path):
    """The judge itself: weights that differ in a bit, a broken file and steps that are gone are noticed."""
    import torch

    faults = script("faults")
    good = {"global_step": 4, "state_dict": {"w": torch.ones(3)}, "scdiva": {"batches_seen": 8}}
    altered = {**good, "state_dict": {"w": torch.ones(3) + 2**-20}}
    assert faults.digest(good) != faults.digest(altered)
    for content, done, expected in ((good, 5, (1, 1, 0)), (good, 9, (1, 1, 1)), (altered, 5, (1, 0, 0))):
        trial = faults.Trial("test", None, {4: faults.digest(good)}, tmp_path)
        torch.save(content, tmp_path / "last.ckpt")
        trial.judge(done, 4)
        assert (trial.tried, trial.exact, trial.lost) == expected
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:300])
    trial.judge(5, 4)
    assert trial.lost == 1

# ruff: noqa
"""Copy the study's reader into the bundled model."""

import json, sys, torch
from dataclasses import replace
from pathlib import Path
from convert import convert
from scdiva.models import ScDiVa, load_model, save_model

B = Path("src/scdiva/checkpoints/scdiva-mini")
m = load_model(B, device="cpu")
assert m.reader is None
new = ScDiVa(replace(m.config, reader=True))
new.load_state_dict({**m.state_dict(), **{f"reader.{k}": v for k, v in convert(torch.load(sys.argv[1])).items()}})
new.eval()
meta = {
    **m.metadata,
    "reader": [
        {
            "steps": 5698,
            "seconds": 1700,
            "device": "cpu",
            "batch_size": 40,
            "queries": 256,
            "context_cells": 400,
            "learning_rate": 0.002,
            "excluded": Path("ex.txt").read_text().split(),
            "studies": 27,
            "cells": 29005,
            "note": "Trained by a study that preceded scripts/train_reader.py: the same batches and loss, cosine by time, weight decay 0.01.",
        }
    ],
}
text = (B / "README.md").read_text()
open("r.md", "w").write(text)
new_text = open("card.md").read()
save_model(new, m.vocabulary, B, card=new_text, metadata=meta, dtype="float16", overwrite=True)
a, b = load_model(B, device="cpu").state_dict(), m.state_dict()
assert all(torch.equal(a[k], b[k]) for k in b)
print(sum(f.stat().st_size for f in B.iterdir()), len(a) - len(b))

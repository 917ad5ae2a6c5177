from __future__ import annotations

import numpy as np
import pytest

from scdiva import cli
from scdiva.pp import corpus_entropy
from scdiva.tokenizer.entropy import EntropyHistogram
from scdiva.tokenizer.vocabulary import Vocabulary


def run(*arguments) -> int:
    return cli.main(["entropy", *map(str, arguments)])


def test_one_pass_over_a_folder(files, tmp_path, capsys):
    out = tmp_path / "counted.safetensors"
    assert run(files, "-o", out, "--vocabulary", files / "genes.safetensors", "--min_genes", 47) == 0
    assert capsys.readouterr().out.strip() == str(out)
    genes = Vocabulary.read(files / "genes.safetensors")
    expected = corpus_entropy([files / f"{name}.h5ad" for name in "abc"], genes, min_genes=47)
    assert 0 < expected.n_cells < 80
    np.testing.assert_array_equal(Vocabulary.read(out).table["entropy"], expected.entropy()[3:])
    # the same as leaving the cells out by hand
    import anndata as ad

    kept = []
    for name in "abc":
        adata = ad.read_h5ad(files / f"{name}.h5ad")
        kept.append(adata[np.asarray((adata.X > 0).sum(axis=1)).ravel() >= 47].copy())
    assert corpus_entropy(kept, genes) == expected


def test_parts_add_up_to_one_pass(files, tmp_path):
    genes = ("--vocabulary", files / "genes.safetensors", "--min_genes", 0)
    parts = []
    for name in "ab":
        parts.append(tmp_path / f"{name}.npz")
        assert (
            run(files / f"{name}.h5ad", "-o", tmp_path / f"{name}.safetensors", "--histogram", parts[-1], *genes) == 0
        )
    whole = tmp_path / "whole.npz"
    merged = ("--merge", f"[{parts[0]}, {parts[1]}]")
    assert run(files / "c.h5ad", "-o", tmp_path / "whole.safetensors", *merged, "--histogram", whole, *genes) == 0
    expected = corpus_entropy([files / f"{name}.h5ad" for name in "abc"], files / "genes.safetensors")
    assert EntropyHistogram.load(whole) == expected
    assert run("-o", tmp_path / "again.safetensors", "--merge", f"[{whole}]", *genes) == 0
    assert Vocabulary.read(tmp_path / "again.safetensors") == Vocabulary.read(tmp_path / "whole.safetensors")
    np.testing.assert_array_equal(
        Vocabulary.read(tmp_path / "again.safetensors").table["entropy"], expected.entropy()[3:]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to count"),
        (["nowhere.h5ad"], "nowhere.h5ad"),
        (["FILES/a.h5ad", "--min_genes", "500"], "no cell has 500 known genes"),
        (["--merge", "[FILES/other.npz]"], "other.npz: histograms of different vocabularies"),
        (["--merge", "[FILES/other.npz, FILES/other.npz]"], "given twice"),
        (["FILES/a.h5ad", "--histogram", "nowhere/h.npz"], "no folder 'nowhere'"),
        (["FILES/a.h5ad", "--histogram", "h.safetensors"], "histogram must end in .npz; got 'h.safetensors'"),
        (["FILES/a.h5ad", "--verbosity", "loud"], "settings.verbosity must be one of"),
        (["--merge", "[none.npz]"], "no file 'none.npz'"),
    ],
)
def test_what_cannot_be_counted_is_said_in_a_line(files, tmp_path, capsys, arguments, message):
    EntropyHistogram(7, "x").save(files / "other.npz")
    arguments = [one.replace("FILES", str(files)) for one in arguments]
    assert run(*arguments, "-o", tmp_path / "out.safetensors", "--vocabulary", files / "genes.safetensors") == 1
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("--out", "genes.safetensors"),
        ("--out", "model/vocabulary.safetensors"),
        ("--out", "a.safetensors"),
        ("--histogram", "h.npz"),
    ],
)
def test_what_is_read_is_never_written(files, tmp_path, monkeypatch, capsys, target, name):
    """Not by a link either, nor with --overwrite, and nothing is counted before that is seen."""
    genes = Vocabulary.read(files / "genes.safetensors")
    (tmp_path / "model").mkdir()
    for one in ("genes.safetensors", "model/vocabulary.safetensors"):
        genes.write(tmp_path / one)
    EntropyHistogram(genes.n_genes + 3, genes.fingerprint).save(tmp_path / "h.npz")
    (tmp_path / "a.h5ad").write_bytes((files / "a.h5ad").read_bytes())
    (tmp_path / "a.safetensors").symlink_to("a.h5ad")
    monkeypatch.setattr("scdiva.pp.corpus_entropy", None)
    before = (tmp_path / name).read_bytes()
    words = [tmp_path / "a.h5ad", "--merge", f"[{tmp_path / 'h.npz'}]", "--overwrite", target, tmp_path / name]
    if target != "--out":
        words += ["--out", tmp_path / "new.safetensors"]
    assert run(*words, "--vocabulary", tmp_path / ("model" if "model" in name else "genes.safetensors")) == 1
    assert "is the file that is read" in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == before
    assert not (tmp_path / "new.safetensors").exists()


def test_what_stands_there_is_replaced_if_that_is_said(files, tmp_path, capsys):
    words = [
        files / "a.h5ad",
        "--vocabulary",
        files / "genes.safetensors",
        "--min_genes",
        0,
        "-o",
        tmp_path / "o.safetensors",
    ]
    for option, name in (("-o", "o.safetensors"), ("--histogram", "o.npz")):
        (tmp_path / name).write_text("mine")
        assert run(*words, option, tmp_path / name) == 1
        said = capsys.readouterr().err
        assert name in said
        assert "exists. Pass another out, or --overwrite." in said
        assert (tmp_path / name).read_text() == "mine"
        assert run(*words, option, tmp_path / name, "--overwrite") == 0
        (tmp_path / "o.safetensors").unlink()
    assert EntropyHistogram.load(tmp_path / "o.npz").n_cells == 40
    assert run(*words[:-1], tmp_path / "o.txt") == 1
    assert "out must end in .safetensors" in capsys.readouterr().err


def test_home_is_found_and_what_is_done_is_said(files, tmp_path, monkeypatch, caplog):
    from scdiva import settings

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.h5ad", "b.h5ad", "genes.safetensors"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    words = ["--vocabulary", "~/genes.safetensors", "--min_genes", 0, "--progress", "false"]
    assert run("~/a.h5ad", "-o", "~/a.safetensors", "--histogram", "~/a.npz", *words) == 0
    assert "cells counted" not in caplog.text
    assert run("~/b.h5ad", "-o", "~/b.safetensors", "--merge", "[~/a.npz]", *words, "--verbosity", "info") == 0
    assert "60 cells counted" in caplog.text
    assert (tmp_path / "a.safetensors").exists()
    assert (tmp_path / "b.safetensors").exists()
    assert (settings.progress, settings.verbosity) == (True, "warning")


def test_a_vocabulary_that_cannot_be_written_leaves_the_older_one(files, tmp_path, monkeypatch, capsys):
    def failing(self, path):
        path.write_text("half of it")
        raise OSError("no space left")

    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    monkeypatch.setattr(Vocabulary, "write", failing)
    words = [files / "a.h5ad", "--vocabulary", files / "genes.safetensors", "--min_genes", 0, "-o", out, "--overwrite"]
    assert run(*words) == 1
    assert "no space left" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]

"""Screens in scverse's layout: a server that behaves like theirs, small files with their columns."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.datasets import _scverse, adamson_2016, kang_2018, norman_2019

pytest.importorskip("pooch", reason="needs pooch, which a full install brings")

FILES = {
    norman_2019: "norman_2019_raw.h5ad",
    adamson_2016: "adamson_2016_upr_perturb_seq.h5ad",
    kang_2018: "kang_2018.h5ad",
}


class Handler(http.server.SimpleHTTPRequestHandler):
    """Refuses the clients that scverse's server refuses."""

    def send_head(self):
        if self.headers["User-Agent"].startswith(("python-requests", "Python-urllib")):
            return self.send_error(403)
        self.server.asked.append(self.command)
        return super().send_head()

    def log_message(self, *_):
        pass


def cells(**obs) -> ad.AnnData:
    n = len(next(iter(obs.values())))
    counts = sp.csr_matrix(np.random.default_rng(0).poisson(1.0, (n, 8)).astype(np.float32))
    adata = ad.AnnData(counts, obs={name: np.array(values, dtype=object) for name, values in obs.items()})
    adata.obs_names = [f"cell{i}" for i in range(n)]
    for name in adata.obs:
        adata.obs[name] = adata.obs[name].astype("category")
    return adata


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The three files behind the public address, and an empty data folder."""
    there = tmp_path / "there"
    there.mkdir()
    cells(guide_identity=["A_NegCtrl0__A_NegCtrl0", "B_A__B_A"]).write_h5ad(there / FILES[norman_2019])
    cells(perturbation=["SPI1_pDS255", "63(mod)_pBA580"]).write_h5ad(there / FILES[adamson_2016])
    cells(label=["ctrl", "stim"], replicate=["101", "1488"]).write_h5ad(there / FILES[kang_2018])
    handler = functools.partial(Handler, directory=there)
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    found.asked, found.there = [], there
    threading.Thread(target=found.serve_forever, daemon=True).start()
    monkeypatch.setattr(_scverse, "ADDRESS", f"http://127.0.0.1:{found.server_port}")
    monkeypatch.delenv("SCDIVA_DATA_URL", raising=False)
    monkeypatch.setattr(sd.settings, "data_url", None)
    monkeypatch.setattr(sd.settings, "data_dir", tmp_path / "data")
    monkeypatch.setattr(sd.settings, "progress", False)
    yield found
    found.shutdown()


@pytest.mark.parametrize("reader", FILES)
def test_the_size_is_stated_before_anything_is_downloaded(server, reader, tmp_path):
    n_bytes = (server.there / FILES[reader]).stat().st_size
    said = rf"sd\.datasets\.{reader.__name__}\(download=True\) downloads {n_bytes / 1e6:.1f} MB from http"
    with pytest.raises(FileNotFoundError, match=said):
        reader()
    assert server.asked == ["HEAD"]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("reader", FILES)
def test_downloaded_once_with_a_checksum_that_is_verified(server, reader, tmp_path):
    adata = reader(download=True)
    here, source = tmp_path / "data" / FILES[reader], server.there / FILES[reader]
    assert here.read_bytes() == source.read_bytes()
    recorded = here.with_name(f"{here.name}.sha256").read_text()
    assert recorded == f"{hashlib.sha256(source.read_bytes()).hexdigest()}  {here.name}\n"
    source.unlink()
    again = reader()  # neither a server nor download=True is needed any more
    np.testing.assert_array_equal(again.X.toarray(), adata.X.toarray())
    assert again.obs.equals(adata.obs)
    cells(label=["ctrl"]).write_h5ad(here)
    before = here.read_bytes()
    with pytest.raises(ValueError, match="has changed since it was downloaded"):
        reader(download=True)
    assert here.read_bytes() == before


def test_a_failed_download_leaves_nothing(server, tmp_path, monkeypatch):
    (server.there / FILES[kang_2018]).unlink()
    with pytest.raises(ConnectionError, match=r"404.*pass path="):
        kang_2018(download=True)
    assert not [file for file in (tmp_path / "data").rglob("*") if file.is_file()]
    with pytest.raises(FileNotFoundError, match="size unknown: the server does not answer"):
        kang_2018()
    monkeypatch.setattr(_scverse, "_HEADERS", {})
    with pytest.raises(ConnectionError, match="403"):  # the header is what lets us in
        norman_2019(download=True)


def test_a_named_mirror_takes_the_place_of_the_public_address(server, monkeypatch):
    monkeypatch.setattr(sd.settings, "data_url", f"{_scverse.ADDRESS}/")
    monkeypatch.setattr(_scverse, "ADDRESS", "http://127.0.0.1:9")
    assert kang_2018(download=True).n_obs == 2


@pytest.mark.parametrize("column", ["perturbation_name", "guide_identity"])
def test_labels_of_norman(column, tmp_path):
    given = {
        "perturbation_name": ["control", "KLF1", "SET+KLF1", "CEBPE+RUNX1T1", np.nan],
        "guide_identity": [
            "NegCtrl10_NegCtrl0__NegCtrl10_NegCtrl0", "NegCtrl0_KLF1__NegCtrl0_KLF1", "SET_KLF1__SET_KLF1",
            "CEBPE_RUNX1T1__CEBPE_RUNX1T1", "",
        ],
    }[column]  # fmt: skip
    cells(**{column: given}).write_h5ad(tmp_path / "norman.h5ad")
    labels = norman_2019(tmp_path / "norman.h5ad").obs["perturbation"]
    assert labels.tolist()[:4] == ["control", "KLF1", "KLF1+SET", "CEBPE+RUNX1T1"]
    assert labels.isna().tolist() == [False] * 4 + [True]


def test_labels_of_adamson(tmp_path):
    guides = [
        "SPI1_pDS255", "62(mod)_pBA581", "63(mod)_pBA580", "Gal4-4(mod)_pBA582", "*", "PERK_only_pMJ146",
        "ATF6_IRE1_pMJ152", "3x_neg_ctrl_pMJ144-1", "C7orf26_pDS004", np.nan,
    ]  # fmt: skip
    cells(perturbation=guides).write_h5ad(tmp_path / "adamson.h5ad")
    adata = adamson_2016(tmp_path / "adamson.h5ad")
    expected = ["SPI1", *["control"] * 3, None, "PERK", "ATF6+IRE1", "control", "C7orf26", None]
    assert [None if label is np.nan else label for label in adata.obs["perturbation"]] == expected
    assert adata.obs["guide"].tolist()[:4] == guides[:4]
    assert adata.obs["guide"].isna().to_numpy().nonzero()[0].tolist() == [4, 9]
    adata.write_h5ad(tmp_path / "again.h5ad")  # what was read once is read again to the same
    assert adamson_2016(tmp_path / "again.h5ad").obs["perturbation"].equals(adata.obs["perturbation"])


def test_labels_of_kang_and_counts_of_a_layer(tmp_path):
    adata = cells(label=["ctrl", "stim", "stim"], replicate=["101", "1015", "101"], cell_type=["B", "T", "T"])
    counts = adata.X.copy()
    adata.layers["counts"], adata.X = counts, np.log1p(adata.X.toarray())
    adata.write_h5ad(tmp_path / "kang.h5ad")
    read = kang_2018(tmp_path / "kang.h5ad")
    assert read.obs["perturbation"].tolist() == ["control", "IFN-beta", "IFN-beta"]
    assert read.obs["donor"].cat.categories.tolist() == ["101", "1015"]
    np.testing.assert_array_equal(read.X.toarray(), counts.toarray())


@pytest.mark.parametrize("reader", FILES)
def test_a_file_without_the_columns_is_refused_by_name(reader, tmp_path):
    cells(batch=["a", "b"]).write_h5ad(tmp_path / "other.h5ad")
    with pytest.raises(ValueError, match=r"obs has none of the columns .*; it has batch\. Read the file with anndata"):
        reader(tmp_path / "other.h5ad")


def test_what_is_read_goes_through_the_perturbation_calls(tmp_path):
    toy = sd.datasets.toy(n_cells=120, n_genes=90)
    guides = ["NegCtrl0_NegCtrl1", "KLF1_NegCtrl0", "SET_NegCtrl0", "KLF1_SET", "BAK1_NegCtrl0", "BAK1_SET"]
    toy.obs["guide_identity"] = [f"{guide}__{guide}" for guide in guides] * 20
    toy.write_h5ad(tmp_path / "screen.h5ad")
    adata = norman_2019(tmp_path / "screen.h5ad")
    sd.pp.split_perturbations(adata, "perturbation", by="combination", n_splits=2)
    held_out = adata.obs["scdiva_split"] == adata.obs["scdiva_split"].cat.categories[0]
    assert set(adata.obs["perturbation"]) == {"control", "KLF1", "SET", "KLF1+SET", "BAK1", "BAK1+SET"}
    assert held_out.any()

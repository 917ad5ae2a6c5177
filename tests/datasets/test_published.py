"""Published datasets: a server with scverse's layout and its faults, the data folder, a mirror, and the columns."""

from __future__ import annotations

import csv
import hashlib
import http.server
import re
import threading
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import scdiva as sd
from scdiva.datasets import _published as _download

pytest.importorskip("pooch", reason="needs pooch, which a full install brings")

NAMES = ("pbmc3k", "kang", "norman", "norman_subset", "adamson", "pancreas", "mouse_brain", "mouse_pancreas")
TABLE = list(csv.DictReader(_download.TABLE.open(encoding="utf-8"), delimiter="\t"))
CALLS = {
    "pbmc3k": sd.datasets.pbmc3k,
    "kang": sd.datasets.kang,
    "norman": lambda: sd.datasets.norman(download=True),
    "norman_subset": lambda: sd.datasets.norman(subset=True),
    "adamson": lambda: sd.datasets.adamson(download=True),
    "mouse_pancreas": sd.datasets.mouse_pancreas,
}
FIRST = {name: next(row for row in TABLE if row["name"] == name) for name in NAMES}
KNOWN = [name for name in CALLS if FIRST[name]["sha256"]]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Reject the clients that scverse's server rejects, and fail in the way that `server.fault` names."""

    def do_GET(self):
        self.server.asked.append(self.path)
        file, fault = Path(self.translate_path(self.path)), self.server.fault
        if "ython" in self.headers["User-Agent"]:
            return self.send_error(403)
        if isinstance(fault, int):
            return self.send_error(fault)
        if not file.is_file():
            return self.send_error(404)
        body = b"<!DOCTYPE html><title>Down</title>\x1b[2J" if fault == "html" else file.read_bytes()
        self.send_response(200)
        if fault != "cut, no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault in ("cut", "cut, no length", "stalled") else body)
        if fault == "stalled":
            self.server.go_on.wait(20)

    def log_message(self, *_):
        pass


def cells(n_genes: int = 8, **obs) -> ad.AnnData:
    n = len(next(iter(obs.values())))
    counts = sp.csr_matrix(np.random.default_rng(0).poisson(1.0, (n, n_genes)).astype(np.float32))
    adata = ad.AnnData(counts, obs={name: np.array(values, dtype=object) for name, values in obs.items()})
    adata.obs_names = [f"cell{i}" for i in range(n)]
    for name in adata.obs:
        adata.obs[name] = adata.obs[name].astype("category")
    return adata


def perturbench() -> ad.AnnData:
    """Log values of two screens, as PerturBench keeps them; the second cell's smallest count is two."""
    counts = np.array([[1, 0, 3, 2], [2, 4, 0, 6], [5, 1, 1, 0]], dtype=np.float64)
    adata = cells(4, perturbation=["control", "A+B", "C"], dataset=["norman19", "norman19", "mcfaline23"])
    adata.obs["ncounts"] = totals = np.array([20.0, 30.0, 9.0])
    adata.X, adata.uns["log1p"] = sp.csr_matrix(np.log1p(1e4 * counts / totals[:, None])), {}
    return adata


def spliced() -> ad.AnnData:
    """Counts of spliced and unspliced molecules, as scVelo keeps them."""
    adata = cells(clusters=["Ductal", "Beta", "Beta"])
    adata.layers["spliced"], adata.layers["unspliced"] = adata.X.copy(), adata.X * 2
    adata.X = adata.X * 3
    return adata


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Small files under the paths of the public addresses, a table of theirs, and an empty data folder."""
    pbmc3k = cells(x=[0, 0, 0])
    pbmc3k.obs_names = ["AAACATTGAGCTAC-1", "AAACATACAACCAC-1", "TTTTTTTTTTTTTT-1"]
    contents = {
        "pbmc3k": pbmc3k,
        "kang": cells(label=["ctrl", "stim"], replicate=["patient_101", "patient_1488"], cell_type=["B", "T"]),
        "norman": cells(guide_identity=["A_NegCtrl0__A_NegCtrl0", "B_A__B_A"]),
        "norman_subset": perturbench(),
        "adamson": cells(perturbation=["SPI1_pDS255", "63(mod)_pBA580"]),
        "mouse_pancreas": spliced(),
    }
    folder = tmp_path / "there"
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Handler(*a, directory=folder))
    httpd.asked, httpd.fault, httpd.go_on = [], None, threading.Event()
    httpd.address = f"http://127.0.0.1:{httpd.server_port}"
    httpd.files, rows = {}, []
    for row in (row | {} for row in TABLE):
        path = re.sub("^https://[^/]+/", "", row["address"])
        row["address"] = f"{httpd.address}/{path}"
        if row == FIRST[row["name"]] | {"address": row["address"]} and row["name"] in contents:
            file = httpd.files[row["name"]] = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            contents[row["name"]].write_h5ad(file)
            row["sha256"] = row["sha256"] and hashlib.sha256(file.read_bytes()).hexdigest()
        rows.append(row)
    table = tmp_path / "published.tsv"
    with table.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, rows[0], delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(_download, "TABLE", table)
    monkeypatch.delenv("SCDIVA_DATA_URL", raising=False)
    monkeypatch.delenv("SCDIVA_DATA_DIR", raising=False)
    for name, value in {"data_url": None, "data_dir": tmp_path / "data", "progress": False}.items():
        monkeypatch.setattr(sd.settings, name, value)
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    yield httpd
    httpd.go_on.set()
    httpd.shutdown()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("name", CALLS)
def test_downloaded_once_then_read_without_a_network(server, name, tmp_path):
    adata = CALLS[name]()
    here, source = tmp_path / "data" / FIRST[name]["file"], server.files[name]
    assert here.read_bytes() == source.read_bytes()
    assert server.asked == [server.files[name].relative_to(tmp_path / "there").as_posix().join(("/", ""))]
    assert files(here.parent) == [here.name] if name in KNOWN else [here.name, f"{here.name}.sha256"]
    server.shutdown()
    server.server_close()
    call = {"norman": sd.datasets.norman, "adamson": sd.datasets.adamson}.get(name, CALLS[name])
    again = call()  # without download=True
    np.testing.assert_array_equal(again.X.toarray(), adata.X.toarray())
    assert again.obs.equals(adata.obs)

    changed = bytearray(here.read_bytes())
    changed[-1] ^= 1
    here.write_bytes(changed)
    with pytest.raises(ValueError, match=rf"{here.name} is not the published file, or has changed.*path="):
        CALLS[name]()
    assert here.read_bytes() == changed


def test_columns_and_counts_of_what_is_downloaded(server, tmp_path):
    assert sd.datasets.pbmc3k().obs["cell_type"].tolist() == ["B", "Memory CD4 T", "unlabelled"]
    adata = sd.datasets.kang()
    assert adata.obs["perturbation"].tolist() == ["control", "IFN-beta"]
    assert adata.obs["donor"].tolist() == adata.obs["batch"].tolist() == ["101", "1488"]
    adata = sd.datasets.norman(subset=True)
    assert adata.obs["perturbation"].tolist() == ["control", "A+B"]
    np.testing.assert_array_equal(adata.X.toarray(), [[1, 0, 3, 2], [2, 4, 0, 6]])
    assert adata.X.dtype == np.float32
    assert "log1p" not in adata.uns
    assert sd.datasets.norman(download=True).obs["perturbation"].tolist() == ["A", "A+B"]
    assert sd.datasets.adamson(download=True).obs["perturbation"].tolist() == ["SPI1", "control"]
    adata, original = sd.datasets.mouse_pancreas(), spliced()
    assert adata.obs["cell_type"].tolist() == ["Ductal", "Beta", "Beta"]
    assert (original.layers["spliced"] != adata.X).nnz == 0
    assert not adata.layers
    del original.layers["spliced"]
    original.write_h5ad(tmp_path / "other.h5ad")
    with pytest.raises(ValueError, match=r'layers\["spliced"\]'):
        sd.datasets.mouse_pancreas(tmp_path / "other.h5ad")


@pytest.mark.parametrize(("name", "size"), [("norman", "1.7 GB"), ("adamson", "0.5 GB")])
def test_a_large_file_is_downloaded_only_when_asked_for(server, name, size, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"sd\.datasets\.{name}\(download=True\) downloads {size} from http"):
        getattr(sd.datasets, name)()
    assert not server.asked
    assert not (tmp_path / "data").exists()
    sd.datasets.norman(subset=True)
    with pytest.raises(FileNotFoundError, match="download=True"):  # not the subset that was downloaded
        getattr(sd.datasets, name)()


FAULTS = {
    "cut": (ConnectionError, "the connection ended before the whole file was sent"),
    "cut, no length": (ValueError, "was cut off"),
    "stalled": (ConnectionError, r"sent nothing for 0\.3 seconds"),
    "html": (ValueError, r"is not an h5ad file, it begins with '<!DOCTYPE html>"),
    403: (ConnectionError, "403 Forbidden"),
    404: (FileNotFoundError, "404 Not Found"),
    503: (ConnectionError, "503 Service Unavailable"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["kang", "adamson"])  # with and without a known checksum
def test_a_failed_download_leaves_nothing_and_can_be_repeated(server, name, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(_download, "_TIMEOUT", (1.0, 0.3))
    server.fault, (kind, reason) = fault, FAULTS[fault]
    with pytest.raises(kind, match=reason) as caught:
        CALLS[name]()
    message = str(caught.value)
    assert f"{server.address}/pertpy/{FIRST[name]['file']}" in message
    assert f"sd.datasets.{name}(path=" in message
    assert message.isprintable()
    assert caught.value.__cause__ is None  # no traceback of requests
    assert files(tmp_path / "data") == []
    server.fault = None
    assert CALLS[name]().n_obs == 2


def test_other_bytes_no_network_and_an_unwritable_folder_are_named(server, tmp_path, monkeypatch):
    cells(label=["ctrl"], replicate=["101"]).write_h5ad(server.files["kang"])
    with pytest.raises(ValueError, match=r"is not the published file: its SHA-256 is [0-9a-f]{64}, not .*path="):
        sd.datasets.kang()
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionError, match=r"kang_2018\.h5ad can't be downloaded: no connection to the server"):
        sd.datasets.kang()
    assert files(tmp_path / "data") == []
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sd.settings, "data_dir", tmp_path / "file" / "data")
    with pytest.raises(OSError, match=r"can't be written.*sd\.settings\.data_dir"):
        sd.datasets.kang()


def test_a_mirror_takes_the_place_of_the_addresses(server, tmp_path, monkeypatch):
    mirror = tmp_path / "there" / "mirror"
    mirror.mkdir()
    monkeypatch.setenv("SCDIVA_DATA_URL", f"{server.address}/mirror/")
    monkeypatch.setenv("SCDIVA_DATA_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(sd.settings, "data_dir", None)
    with pytest.raises(FileNotFoundError, match=r"/mirror/kang_pbmc_12k_1287g\.h5ad can't be downloaded: 404"):
        sd.datasets.kang()
    (mirror / "kang_2018.h5ad").write_bytes(server.files["kang"].read_bytes())
    assert sd.datasets.kang().n_obs == 2
    assert files(tmp_path / "other") == ["kang_2018.h5ad"]


def test_a_smaller_file_in_the_folder_or_on_the_mirror_is_used(server, tmp_path, monkeypatch):
    """The table's other row of kang: unstimulated cells, with donors as numbers and no column of stimulation."""
    small = cells(cell_type=["B", "T", "T"], donor=[101, 107, 101])
    small.obs["donor"], small.uns["source_path"] = np.array([101, 107, 101], dtype=np.int32), "data/kang_se.rda"
    mirror = tmp_path / "there" / "mirror" / "kang_pbmc_12k_1287g.h5ad"
    mirror.parent.mkdir()
    small.write_h5ad(mirror)
    table = _download.TABLE.read_text()
    published = next(row["sha256"] for row in TABLE if row["file"] == mirror.name)
    _download.TABLE.write_text(table.replace(published, hashlib.sha256(mirror.read_bytes()).hexdigest()))
    monkeypatch.setattr(sd.settings, "data_url", f"{server.address}/mirror")
    assert sd.datasets.kang().n_obs == 3
    monkeypatch.setattr(sd.settings, "data_url", None)
    server.asked.clear()
    adata = sd.datasets.kang()
    assert adata.obs["donor"].tolist() == ["101", "107", "101"]
    assert adata.obs["perturbation"].tolist() == ["control"] * 3


@pytest.mark.parametrize("name", ["pancreas", "mouse_brain"])
def test_without_a_public_file_the_error_says_where_to_get_it(server, name):
    source = FIRST[name]["address"].rpartition("/")[2]
    with pytest.raises(FileNotFoundError, match=rf'made from http.*/{source}.*sd\.datasets\.{name}\(path="'):
        getattr(sd.datasets, name)()
    assert not server.asked


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("perturbation_name", ["control", "KLF1", "SET+KLF1", "CEBPE+RUNX1T1", np.nan]),
        ("guide_identity", ["NegCtrl10_NegCtrl0__N", "NegCtrl0_KLF1__N", "SET_KLF1__SET", "CEBPE_RUNX1T1__C", ""]),
    ],
)
def test_labels_of_norman(column, names, tmp_path):
    cells(**{column: names}).write_h5ad(tmp_path / "norman.h5ad")
    labels = sd.datasets.norman(tmp_path / "norman.h5ad").obs["perturbation"]
    assert labels.tolist()[:4] == ["control", "KLF1", "KLF1+SET", "CEBPE+RUNX1T1"]
    assert labels.isna().tolist() == [False] * 4 + [True]
    with pytest.raises(ValueError, match="leave out subset=True"):
        sd.datasets.norman(tmp_path / "norman.h5ad", subset=True)


def test_labels_of_adamson(tmp_path):
    guides = [
        "SPI1_pDS255", "62(mod)_pBA581", "63(mod)_pBA580", "Gal4-4(mod)_pBA582", "*", "PERK_only_pMJ146",
        "ATF6_IRE1_pMJ152", "3x_neg_ctrl_pMJ144-1", "C7orf26_pDS004", np.nan,
    ]  # fmt: skip
    cells(perturbation=guides).write_h5ad(tmp_path / "adamson.h5ad")
    adata = sd.datasets.adamson(tmp_path / "adamson.h5ad")
    expected = ["SPI1", *["control"] * 3, None, "PERK", "ATF6+IRE1", "control", "C7orf26", None]
    assert [None if label is np.nan else label for label in adata.obs["perturbation"]] == expected
    assert adata.obs["guide"].tolist()[:4] == guides[:4]
    assert adata.obs["guide"].isna().to_numpy().nonzero()[0].tolist() == [4, 9]
    adata.write_h5ad(tmp_path / "again.h5ad")  # reading it again gives the same labels
    assert sd.datasets.adamson(tmp_path / "again.h5ad").obs["perturbation"].equals(adata.obs["perturbation"])


@pytest.mark.parametrize("name", ["kang", "norman", "adamson"])
def test_a_file_without_the_columns_is_refused_by_name(name, tmp_path):
    cells(batch=["a", "b"]).write_h5ad(tmp_path / "other.h5ad")
    with pytest.raises(ValueError, match=r"obs has none of the columns .*; it has batch\. Read the file with anndata"):
        getattr(sd.datasets, name)(tmp_path / "other.h5ad")
    with pytest.raises(ValueError, match=r"None of the 2 cells is one of PBMC 3k's: the first is \['cell0'\]"):
        sd.datasets.pbmc3k(tmp_path / "other.h5ad")

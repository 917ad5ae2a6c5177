from __future__ import annotations

import logging
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from scdiva.tokenizer.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """200 real genes with entropies that have ties and a gap."""
    human = Vocabulary.human()
    table = human.table
    table = table[(table["biotype"] == "protein_coding") & (table["symbol"] != table["ensembl_id"])]
    small = human.subset(table.index[:200].to_numpy())
    entropy = np.round(np.random.default_rng(0).uniform(0, 2, 200), 1).astype(np.float32)
    entropy[7] = np.nan
    return small.with_entropy(entropy)


def make_cells(vocabulary: Vocabulary, n_obs: int = 60, n_vars: int = 80, seed: int = 0) -> ad.AnnData:
    """Counts of some of the vocabulary's genes and of two genes that it does not hold."""
    rng = np.random.default_rng(seed)
    genes = rng.choice(vocabulary.symbols, n_vars - 2, replace=False)
    names = rng.permutation([*genes, "NOGENE1", "NOGENE2"])
    x = rng.negative_binomial(1, 1 / (1 + rng.gamma(1, 4, n_vars)), (n_obs, n_vars)).astype(np.float32)
    x[np.arange(n_obs), rng.integers(0, n_vars, n_obs)] += 1
    x[:, np.isin(names, ["NOGENE1", "NOGENE2"])] = rng.poisson(1, (n_obs, 2))
    obs = pd.DataFrame(index=[f"s{seed}c{i}" for i in range(n_obs)])
    return ad.AnnData(sp.csr_matrix(x), obs=obs, var=pd.DataFrame(index=names))


@pytest.fixture
def cells(vocabulary) -> ad.AnnData:
    return make_cells(vocabulary)


@pytest.fixture(scope="session")
def study_files(vocabulary, tmp_path_factory) -> list[Path]:
    """Three studies of unlike size, with some cells that hold no known gene."""
    folder = tmp_path_factory.mktemp("studies")
    paths = []
    for seed, (n_obs, n_vars) in enumerate([(60, 80), (25, 120), (131, 50)]):
        adata = make_cells(vocabulary, n_obs, n_vars, seed)
        if seed == 2:
            x = adata.X.toarray()
            x[[5, 70]] = 0
            adata.X = sp.csr_matrix(x)
        paths.append(folder / f"study{seed}.h5ad")
        adata.write_h5ad(paths[-1])
    return paths


@pytest.fixture(scope="module")
def s3():
    """Run an S3 server in this process, configured for fsspec by environment variables; give its file system class."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs, of the extra remote, is not installed")
    moto = pytest.importorskip("moto.server", reason="moto[s3], flask and flask-cors are not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "me")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        s3fs.S3FileSystem.clear_instance_cache()
        yield s3fs.S3FileSystem
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()

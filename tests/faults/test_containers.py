"""Arguments that contain or resemble an AnnData object raise an error that names them, before any computation."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import anndata as ad
import pytest

import scdiva as sd


def calls():
    """Every parameter of a public call that takes an AnnData object."""
    for part in ("pp", "tl", "pl", "get"):
        module = getattr(sd, part)
        for name in module.__all__:
            for parameter in inspect.signature(getattr(module, name)).parameters.values():
                if "AnnData" in str(parameter.annotation):
                    yield pytest.param(getattr(module, name), parameter.name, id=f"{part}.{name}({parameter.name})")


def called(function, parameter, value, adata):
    """Call a function with `value` as one parameter, cells, numbers and words as the others that it asks for."""
    arguments = {
        one.name: adata if "AnnData" in str(one.annotation) else 4 if one.annotation == "int" else "cell_type"
        for one in inspect.signature(function).parameters.values()
        if one.default is inspect.Parameter.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    return function(**arguments | {parameter: value})


class MuData(SimpleNamespace):
    """The parts of mudata's class that tell it from AnnData's, where mudata is not installed."""


class SpatialData(SimpleNamespace):
    """The same of spatialdata's."""


def multimodal(rna, names=("rna", "prot"), kinds=None):
    modalities = {name: rna.copy() for name in names}
    for name, kind in zip(names, kinds or (), strict=False):
        modalities[name].var["feature_types"] = kind
    # a MuData object has all parts of AnnData; those that it has no use for are None
    parts = dict.fromkeys(("layers", "raw", "X"))
    return MuData(mod=modalities, obs_names=rna.obs_names, var_names=rna.var_names, uns={}, is_view=False, **parts)


@pytest.mark.fault("MuData and SpatialData")
@pytest.mark.parametrize(("function", "parameter"), [*calls()])
def test_a_container_of_anndata(drawn, function, parameter):
    with pytest.raises(TypeError, match=r"got a MuData of 2 AnnData objects\. Pass the one of RNA: .*mdata\['rna'\]"):
        called(function, parameter, multimodal(drawn), drawn)
    spatial = SpatialData(tables={"cells": drawn}, images={}, shapes={})
    with pytest.raises(
        TypeError, match=r"got a SpatialData of 1 AnnData objects\. Pass the one of RNA: sdata\.tables\['cells'\]"
    ):
        called(function, parameter, spatial, drawn)


@pytest.mark.fault("MuData and SpatialData")
@pytest.mark.parametrize(
    ("name", "within", "message"),
    [
        ("cells.h5mu", "mod", r"holds several AnnData objects: prot, rna\. .*\['rna'\]\.write_h5ad"),
        ("cells.zarr", "mod", r"the one of RNA: of .zarr its own path, such as '.*cells\.zarr/mod/rna'"),
        ("cells.zarr", "tables", r"the one of RNA: of .zarr its own path, such as '.*cells\.zarr/tables/rna'"),
    ],
)
def test_a_file_of_a_container(tmp_path, model, drawn, name, within, message):
    """As they are written: an AnnData group each, and no X beside."""
    import h5py
    import zarr

    file, proteins = tmp_path / name, drawn[:, :5].copy()
    root = h5py.File(file, "w") if name.endswith(".h5mu") else zarr.open_group(str(file), mode="w")
    for part in ("obs", "var"):
        ad.io.write_elem(root, part, getattr(drawn, part)[[]])
    parts = root.create_group(within)
    ad.io.write_elem(parts, "rna", drawn)
    ad.io.write_elem(parts, "prot", proteins)
    if name.endswith(".h5mu"):
        root.close()
    with pytest.raises(ValueError, match=message):
        sd.tl.embed_file(file, tmp_path / "out.h5ad", model=model)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if not name.endswith(".h5mu"):  # the call in the message works
        sd.tl.embed_file(file / within / "rna", tmp_path / "out.h5ad", model=model)


OTHERS = {
    "None": (lambda a: None, r"None\. Calls that write into adata return None"),
    "a path": (lambda a: "cells.h5ad", r"str\. Of a file: (adata|reference) = anndata\.read_h5ad"),
    "a list": (lambda a: [a, a], "a list of 2. Pass one at a time, or join them: .*anndata.concat"),
    "raw": (lambda a: a.raw, r"Raw, which is (adata|reference)\.raw\? .*use_raw=True"),
    "an array": (lambda a: a.X.toarray(), "ndarray. If it holds counts, cells × genes, make one"),
    "a table": (lambda a: a.to_df(), r"DataFrame\. If it holds counts"),
}


@pytest.mark.fault("something else for AnnData")
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_anndata(drawn, kind):
    make, type_name = OTHERS[kind]
    with pytest.raises(TypeError, match=f"expected an AnnData object, got {type_name}"):
        sd.tl.embed(make(drawn))

from __future__ import annotations

import pytest

from scdiva._checks import nearest, no_column, or_nearest, refuse_unknown, speaking_of, warn


def test_a_column_that_is_not_there_is_named_beside_those_that_are():
    error = no_column("adata.obs", "bach", ["batch", "kind"])
    assert isinstance(error, KeyError)
    assert error.args == ("adata.obs has no column 'bach' (did you mean 'batch'?); it has 'batch', 'kind'.",)


def test_unknown_keys_are_refused_all_at_once():
    refuse_unknown(["a", "b"], ["b", "a", "c"], "Thing")
    with pytest.raises(ValueError, match=r"^Thing .*widht .*'width'.*zzz"):
        refuse_unknown(["zzz", "widht", "depth"], ["width", "depth"], "Thing")


def test_capitals_do_not_count_and_no_name_comes_twice():
    assert nearest("klf1", ["KLF10", "KLF1", "KLF1", "TAL1"]) == ["KLF1", "KLF10"]
    assert nearest("Klf1", ["klf1", "KLF1"], n=1) == ["klf1"]  # the likest as it is written
    assert nearest("KLF1", ["klf1", "KLF1"]) == ["KLF1", "klf1"]
    assert or_nearest("CELL_TYPE", ["cell_type", "batch"]) == " (did you mean 'cell_type'?)"
    assert nearest("zzz", ["KLF1"]) == nearest("x", []) == []
    assert or_nearest("zzz", ["KLF1"]) == ""


def test_what_is_read_of_a_second_argument_is_said_of_it():
    with pytest.warns(UserWarning, match="^reference: few genes"), speaking_of("reference"):
        warn("few genes. Pass adata.raw")
    with (
        pytest.raises(KeyError, match=r"reference\.X holds NaN: reference\.X = 0\. my_adata"),
        speaking_of("reference"),
    ):
        raise KeyError("adata.X holds NaN: adata.X = 0. my_adata")
    with pytest.warns(UserWarning, match="^adata.X"):
        warn("adata.X")

from __future__ import annotations

import pytest

from scdiva._nearest import no_column, or_nearest, refuse_unknown


def test_the_nearest_name_is_told_if_there_is_one():
    assert or_nearest("stepz", ["seed", "steps", "clip"]) == " (did you mean 'steps'?)"
    assert or_nearest("zzz", ["seed", "steps"]) == ""
    assert or_nearest("x", []) == ""


def test_a_column_that_is_not_there_is_named_beside_those_that_are():
    error = no_column("adata.obs", "bach", ["batch", "kind"])
    assert isinstance(error, KeyError)
    assert error.args == ("adata.obs has no column 'bach' (did you mean 'batch'?); it has 'batch', 'kind'.",)


def test_unknown_keys_are_refused_all_at_once():
    refuse_unknown(["a", "b"], ["b", "a", "c"], "Thing")
    with pytest.raises(ValueError, match=r"^Thing has no widht \(did you mean 'width'\?\), zzz\.$"):
        refuse_unknown(["zzz", "widht", "depth"], ["width", "depth"], "Thing")

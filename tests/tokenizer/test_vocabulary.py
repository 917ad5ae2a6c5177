import hashlib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scdiva._constants import N_SPECIAL, UNKNOWN
from scdiva.tokenizer import Vocabulary, load_vocabulary
from scdiva.tokenizer import vocabulary as module


def table_of(*rows):
    """Rows of (ensembl id, symbol, previous, alias)."""
    table = pd.DataFrame(rows, columns=["ensembl_id", "symbol", "previous", "alias"])
    return table.assign(biotype="protein_coding", entropy=np.float32(np.nan))


@pytest.fixture
def small():
    return Vocabulary(
        table_of(
            ("ENSG00000000001", "AAA", "OLD1|SHARED", "alpha|NICK"),
            ("ENSG00000000002", "HLA-A", "AAA|SHARED", "NICK|OLD1"),
            ("ENSG00000000003", "C1orf5", "", "SHARED|7b"),
            ("", "SEPTIN7", "SEPT7", ""),
        )
    )


@pytest.mark.parametrize(
    ("row", "how", "names"),
    [
        (1, "ensembl", ["ENSG00000000002", "ENSG00000000002.12", "ENSG00000000002.12_PAR_Y"]),
        (0, "symbol", ["AAA", "  AAA "]),  # a current symbol comes before another gene's previous one
        (1, "symbol", ["HLA.A"]),
        (2, "symbol", ["C1ORF5"]),
        (0, "previous", ["OLD1"]),  # previous comes before alias
        (3, "previous", ["Sep-07"]),
        (0, "alias", ["alpha"]),
        (2, "alias", ["7b"]),
        # previous symbol of two genes: nor is it the alias of a third
        (None, "unknown", ["SHARED", "NICK", "aaa", "ALPHA", "", "nan", "ENSG00000000009"]),
    ],
)
def test_match_order(small, names, row, how):
    for name in names:
        match = small.match([name])
        assert match.tokens.dtype == np.int32
        assert match.tokens.tolist() == [UNKNOWN if row is None else row + N_SPECIAL]
        assert match.how.tolist() == [how]
    assert match.how.categories.tolist() == ["ensembl", "symbol", "previous", "alias", "ortholog", "unknown"]


def test_repeats_need_the_name_they_repeat(small):
    assert small.match(["AAA", "AAA.1", "AAA-2"]).tokens.tolist() == [3, 3, 3]
    assert small.match(["AAA.1"]).tokens.tolist() == [UNKNOWN]
    # an alias is too loose a name to build on
    assert small.match(["alpha", "alpha.1"]).tokens.tolist() == [3, UNKNOWN]


def test_match_of_nothing(small):
    assert small.match([]).tokens.shape == (0,)
    with pytest.raises(TypeError, match="names='CD3D' must be a list"):
        small.match("CD3D")


def test_fingerprint_is_of_ids_and_symbols_in_order(small):
    text = "ENSG00000000001\tAAA\nENSG00000000002\tHLA-A\nENSG00000000003\tC1orf5\n\tSEPTIN7\n"
    assert small.fingerprint == hashlib.sha256(text.encode()).hexdigest()
    assert small.with_entropy(np.ones(4)).fingerprint == small.fingerprint
    assert Vocabulary(small.table.iloc[::-1]).fingerprint != small.fingerprint


def test_entropy_by_token(small):
    vocabulary = small.with_entropy(np.array([0.5, np.nan, 0.1, 0.2]))
    assert vocabulary.entropy.dtype == np.float32
    np.testing.assert_array_equal(vocabulary.entropy, np.float32([0, 0, 0, 0.5, 0.2, 0.1, 0.2]))
    with pytest.raises(ValueError, match=r"holds no entropies.*corpus_entropy"):
        _ = small.entropy
    with pytest.raises(ValueError, match=r"needs shape \(4,\), got \(7,\)"):
        small.with_entropy(np.zeros(7))
    for bad in (-0.1, np.inf):
        with pytest.raises(ValueError, match=r"1 entropies .*'C1orf5'"):
            small.with_entropy(np.array([0.0, 1.0, bad, 1.0]))


def test_subset_keeps_order_and_numbers_anew(small):
    part = small.subset([6, 3])
    assert part.symbols.tolist() == ["AAA", "SEPTIN7"]
    assert part.tokens.tolist() == [3, 4]
    assert len(part) == part.n_genes == 2


@pytest.mark.parametrize(
    ("dropped", "remaining", "queries"),
    [
        ("A.B", "A-B", ["A.B", "A-B"]),  # R's spelling of the kept one
        ("A:B", "A-B", ["A.B", "A-B"]),  # R's spelling of both
        ("C1ORF5", "C1orf5", ["C1ORF5", "C1orf5"]),
        ("MIR1-2", "MIR1", ["MIR1-2", "MIR1"]),  # a repeat of the kept one, were it not a gene
        ("C1orf5-2", "C1orf5", ["C1ORF5-2", "C1ORF5"]),
    ],
)
def test_a_dropped_gene_is_not_taken_for_one_that_resembles_it(dropped, remaining, queries, tmp_path):
    full = Vocabulary(table_of(("", dropped, "", ""), ("", remaining, "", ""), ("", "OTHER", "", "")))
    part = full.subset([4, 5])
    assert part.match(queries).tokens.tolist() == [UNKNOWN, 3]
    # nor by what is made of the smaller vocabulary
    part.with_entropy(np.ones(2)).write(tmp_path / "part.safetensors")
    again = Vocabulary.read(tmp_path / "part.safetensors")
    assert again.match(queries).tokens.tolist() == [UNKNOWN, 3]
    assert again == part.with_entropy(np.ones(2))
    assert again != Vocabulary(again.table)
    assert part.subset([3]).match(queries).tokens.tolist() == [UNKNOWN, 3]
    assert part.subset([4]) == Vocabulary(part.table.iloc[1:])  # nothing resembles OTHER
    # without the gene that is dropped, the name is a spelling of the kept one
    assert Vocabulary(part.table).match(queries).tokens.tolist() == [3, 3]


def test_foreign_names_are_of_no_gene_here(small):
    with pytest.raises(ValueError, match=r"2 foreign names .*'AAA'"):
        Vocabulary(small.table, ["HLA-A", "AAA", "BBB"])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0, 3], "1 tokens .*3 to 6.*first: 0"),
        ([3, 7], "first: 7"),
        ([-1], "first: -1"),
        ([3, 3], "1 tokens stand more than once"),
        ([], "at least one gene"),
    ],
)
def test_subset_refuses(small, tokens, message):
    with pytest.raises(ValueError, match=message):
        small.subset(tokens)


# --- files -----------------------------------------------------------------------------------------------------------
def test_write_and_read(small, tmp_path):
    vocabulary = small.with_entropy(np.array([0.5, np.nan, 0.1, 0.2]))
    vocabulary.write(tmp_path / "a.safetensors")
    vocabulary.write(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    again = Vocabulary.read(tmp_path / "a.safetensors")
    assert again == vocabulary
    assert again != small
    np.testing.assert_array_equal(again.entropy, vocabulary.entropy)
    assert Vocabulary.read(tmp_path / "a.safetensors") is again, "read once while it holds the same"
    small.write(tmp_path / "a.safetensors")
    assert Vocabulary.read(tmp_path / "a.safetensors") == small
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        Vocabulary.read(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="alias"), "has the columns"),
        (lambda t: t.assign(more=1), "has the columns"),
        (lambda t: t.iloc[:0], "at least one gene"),
        (
            lambda t: t.assign(alias=[None, "", "", ""]),
            "column 'alias' holds 1 values .*row 0",
        ),
        (lambda t: t.assign(entropy="high"), "column 'entropy' holds (object|str)"),
    ],
)
def test_constructor_refuses(small, change, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(change(small.table))


def test_load(small, tmp_path, monkeypatch):
    assert load_vocabulary(small) is small
    assert load_vocabulary() == Vocabulary.human()
    folder = tmp_path / "my-model"
    folder.mkdir()
    small.write(folder / "vocabulary.safetensors")
    assert load_vocabulary(folder) == small
    assert load_vocabulary(str(folder / "vocabulary.safetensors")) == small
    monkeypatch.setattr(module, "_CHECKPOINTS", tmp_path)
    assert load_vocabulary("my-model") == small
    with pytest.raises(FileNotFoundError, match=r"no vocabulary 'no-model'.*\['my-model'\]"):
        load_vocabulary("no-model")


# --- any vocabulary --------------------------------------------------------------------------------------------------
names = st.text("ABC1-.", min_size=1, max_size=3) | st.sampled_from(["C1ORF1", "C1orf1", "C1orf1-1", "C1ORF1.1"])


@st.composite
def vocabularies(draw):
    symbols = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    joined = st.lists(names, max_size=3, unique=True).map("|".join)
    rows = [(f"ENSG{i:011d}", symbol, draw(joined), draw(joined)) for i, symbol in enumerate(symbols)]
    return Vocabulary(table_of(*rows))


@settings(max_examples=60, deadline=None)
@given(vocabularies(), st.data())
def test_any_subset_says_the_same_or_nothing(full, data):
    tokens = sorted(data.draw(st.sets(st.sampled_from(full.tokens.tolist()), min_size=1)))
    part = full.subset(tokens)
    every = [*full.symbols, *full.ensembl_ids, *data.draw(st.lists(names, max_size=20))]
    for queries in [every, *([name] for name in every)]:
        for token, answer in zip(full.match(queries).tokens, part.match(queries).tokens, strict=True):
            assert answer == (tokens.index(token) + N_SPECIAL if token in tokens else UNKNOWN)
    np.testing.assert_array_equal(part.match(part.symbols).tokens, part.tokens)
    np.testing.assert_array_equal(part.match(part.ensembl_ids).tokens, part.tokens)


def test_genes_of_another_vocabulary_come_after_ones_own():
    human = Vocabulary.human()
    part = human.subset(human.tokens[::7]).with_entropy(np.linspace(0, 1, len(human.tokens[::7])))
    more = part.with_genes_of(human)
    assert more.n_genes == human.n_genes
    pd.testing.assert_frame_equal(more.table.iloc[: part.n_genes], part.table)
    # every name means the same gene as before, also those that the smaller vocabulary had to forget
    for names in (human.symbols, human.ensembl_ids[human.ensembl_ids != ""]):
        matches, expected = more.match(names), human.match(names)
        np.testing.assert_array_equal(more.symbols[matches.tokens - 3], human.symbols[expected.tokens - 3])
    assert more.with_genes_of(human) is more
    assert part.with_genes_of(part) is part


def test_a_gene_is_the_same_by_symbol_or_ensembl_id():
    def vocabulary_of(rows):
        table = pd.DataFrame(rows, columns=["symbol", "ensembl_id"])
        return Vocabulary(table.assign(previous="", alias="", biotype="", entropy=np.float32(1)))

    one = vocabulary_of([("A", "ENSG00000000001"), ("B", "")])
    two = vocabulary_of([("B", "ENSG00000000002"), ("RENAMED", "ENSG00000000001"), ("C", ""), ("D", "ENSG00000000003")])
    assert one.with_genes_of(two).symbols.tolist() == ["A", "B", "C", "D"]

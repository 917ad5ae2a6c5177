"""The part of the benchmarks page on gene networks, and what the paper says of them."""

from __future__ import annotations

from collections.abc import Callable

from _annotation_table import joined
from _grn_scores import OURS, PAPER_PAIR, PAPER_TARGETS, REMOVED
from _integration_table import made_at
from _markdown import table

METHODS = {
    "embedding": "`tl.grn`, embedding",
    "attention": "`tl.grn`, attention",
    "knockout": "`tl.grn`, knockout",
    "knockout_presence": "`tl.grn`, knockout, of presence",
    "correlation": "`tl.grn`, correlation (Pearson)",
    "spearman": "Spearman",
    "mutual_information": "mutual information",
    "forest": "random forest",
    "cooccurrence": "co-occurrence alone",
    "expression": "product of means",
    "random": "random numbers",
}
REFERENCES = {"trrust": "TRRUST", "dorothea": "DoRothEA"}
COLLECTIONS = {"hallmark": "Hallmark", "reactome": "Reactome"}
WHAT = {"halves": "halves of the cells", "seeds": "two seeds"}
COSTS = ["CPU seconds", "peak MiB"]
WORDS = (
    "Genes that the model knows and more than 1% of a set's cells express. Edges are scored against TRRUST and "
    "DoRothEA (confidence A to C): all of a table's factors by all of its targets, ranked as `get.grn_df` ranks them: "
    "by the weight, or by its size where one below 0 is as strong (both correlations). Such tables hold what someone "
    "looked for, in any tissue, and no pair that is known to be none, so that scores are low for everyone. AUPRC "
    "ratio: average precision over that of a random order, in brackets 95% of resampled factors; null: "
    "the same when the targets of each factor are exchanged for others of like mean expression (mean, and what 5% of "
    "1,000 exchanges exceed), for abundant genes are studied more and correlate more; with a p that is not small, a "
    "graph says no more of these edges than that. Early precision: of as many edges as are known, over chance. Mutual "
    "information: quantile bins of expressing cells, zero a bin of its own. Random forest: GENIE3, 100 trees of depth "
    "10 for each target, all factors to choose from, for known edges alone. Co-occurrence alone: the formula of "
    "attention with all ranks equal, beside which stands what attention itself adds. Product of means and random "
    "numbers know of no pair. Ours by their defaults with the bundled model: all cells, for knockout (removed after "
    "this) 50 of a source. "
    "CPU seconds are of the graph alone, on a machine that had other work to do. How embedding, attention and knockout "
    "read the model, and of how many cells, was settled on after more than a hundred ways had been scored by these "
    "tables on cells of the first two sets, most of them of attention, which flatters ours and their p-values there; "
    "nothing of the others was. sc_mixology was looked at afterwards (six forms of attention, none of them chosen by "
    "it), without the forest, which takes hours there."
)
FAMILY_WORDS = (
    "Are the members of a gene family closer to each other than sets of genes with like degrees? First by edges: the "
    "share of pairs that are an edge in the network as `tl.grn` keeps it, the 100 strongest of each source, in "
    "standard deviations from such sets (z), and how many of 1,000 sets have as large a share (p). Graphs are over the "
    "members of all families and genes detected about as often, 2,000 in all. Knock-outs, a pass for each gene and "
    "cell, and random forests are left out."
)
FAMILY_WEIGHT_WORDS = (
    "The same by the mean weight of all pairs, edges or not. This was looked at first, and of embedding and "
    "correlation only HLA passed: a family whose members mark different cells, as CD does, has strong pairs and as "
    "many that are far apart, which even out. The goals are about edges; they were settled on after this."
)
MODULE_WORDS = (
    "Pairs of module and gene set at a false discovery rate of 5%, and modules that are in such a pair; beside 20 "
    "draws of modules of the same sizes, genes exchanged within tenths of the degrees."
)
STABILITY_WORDS = (
    "Rank correlation of what edges are ranked by, overlap (Jaccard) of the best edges, one in a hundred, and of each "
    "factor's 20 best targets, between two graphs: of two halves of at most 2,000 cells, drawn anew for each of three "
    "seeds (mean), and of two seeds on one of the halves. At most 40 factors and 400 targets, drawn once for all "
    "methods. Pairs that only one of the graphs has a weight for, as no cell of the other half holds both genes, are "
    "in the overlaps alone. What draws nothing at random has 1 for two seeds, and what does not look at the cells has "
    "1 for halves as well, which is no merit; half of the weight of embedding is the model's, whatever the cells. "
    "Knock-outs were not looked at."
)
REGULON_WORDS = (
    "The 20 best targets in CD14+ monocytes among the genes that more than 1% of them express, first ones first; T: "
    "TRRUST has the edge, D: DoRothEA, + activating, - repressing, no sign: not said."
)
SPEED_WORDS = (
    "Cells of the first set, drawn with replacement, half of the counts of each kept; the genes most often detected, "
    "each a source and a target."
)
PAPER_WORDS = (
    "The scDiVa paper prints no figures for its networks. It names HBG1, HBG2, MS4A3 and FTH1 among the 20 genes that "
    "answer to SPI1 in its attention, and TNFRSF13B beside TNFSF13B. **These are the paper's claims**; here is where "
    "these genes stand among all targets in ours. Of genes that are not expressed in these cells nothing can be said. "
    "A dash: the families were not looked at by this method, or fewer than three genes of TNF are expressed."
)


def figure(row: dict, key: str, form: str = ".2f") -> str:
    """A figure, or a dash where it is not defined."""
    return format(row[key], form) if key in row else "-"


def chance(row: dict, key: str) -> str:
    """A p-value, to one digit that counts where it is small."""
    return "-" if key not in row else f"{row[key]:.2f}" if row[key] >= 0.01 else f"{row[key]:.1g}"


def _sized(row: dict) -> list[str]:
    return [f"{row[key]:,.1f}" if key == "cpu_seconds" else f"{row[key]:,.0f}" for key in ("cpu_seconds", "peak_mib")]


def _beside_null(row: dict, key: str) -> list[str]:
    """A score with its interval, the null with what one in twenty exceeds, and the p-value."""
    interval = f" ({figure(row, f'{key}_low')} to {figure(row, f'{key}_high')})" if f"{key}_low" in row else ""
    null = f"{figure(row, f'{key}_null_mean')} (< {figure(row, f'{key}_null_high')})"
    return [figure(row, key) + interval, null, chance(row, f"{key}_p")]


def edges(rows: list[dict]) -> str:
    """A line for each set, table and method."""
    order = list(METHODS)
    rows = sorted(rows, key=lambda row: (list(REFERENCES).index(row["reference"]), order.index(row["arm"])))
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        for row in (row for row in rows if row["set"] == name):
            size = f"{row['n_known']:,} of {row['n_sources']} × {row['n_targets']:,}"
            scores = [text for key in ("auprc_ratio", "early_precision") for text in _beside_null(row, key)]
            place = f"{name}, {REFERENCES[row['reference']]} ({size})"
            lines.append([place, METHODS[row["arm"]], *scores, *_sized(row)])
    header = ["set, table (edges)", "method", "AUPRC ratio", "null", "p", "early precision", "null", "p", *COSTS]
    return joined("### Known edges", table(header, lines))


def families(rows: list[dict]) -> str:
    """A line for each set and family, a column for each method: by edges, and by weights."""
    arms = [arm for arm in METHODS if any(row["arm"] == arm for row in rows)]
    header = ["set, family (genes)", *(METHODS[arm] for arm in arms)]
    lines: dict[str, list[list[str]]] = {"edges_": [], "": []}
    for place in dict.fromkeys((row["set"], row["family"]) for row in rows):
        some = {row["arm"]: row for row in rows if (row["set"], row["family"]) == place}
        n = max(row["n"] for row in some.values())
        for of, table_lines in lines.items():
            figures = (
                f"{figure(row, f'{of}z', '.1f')} ({chance(row, f'{of}p')})" if (row := some.get(arm)) else "-"
                for arm in arms
            )
            table_lines.append([f"{', '.join(place)} ({n})", *figures])
    tables = {of: table(header, some) for of, some in lines.items()}
    return joined("### Gene families", FAMILY_WORDS, tables["edges_"], FAMILY_WEIGHT_WORDS, tables[""])


def modules(rows: list[dict]) -> str:
    """A line for each set, collection and method."""
    lines = [
        [
            f"{row['set']}, {COLLECTIONS[row['collection']]}", METHODS[row["arm"]],
            f"{row['n_modules']:,} of {row['n_genes']:,}",
            f"{row['n_pairs']:,}", f"{row['n_pairs_random']:,.1f} (≤ {row['n_pairs_random_most']:,})",
            f"{row['n_enriched']:,}", f"{row['n_enriched_random']:,.1f} (≤ {row['n_enriched_random_most']:,})",
            *_sized(row),
        ]
        for row in rows
    ]  # fmt: skip
    header = ["set, gene sets", "method", "modules, of genes", "enriched pairs", "at random", "modules in one",
              "at random", *COSTS]  # fmt: skip
    return joined("### Modules", MODULE_WORDS, table(header, lines))


def stable(rows: list[dict]) -> str:
    """A line for each set and method; columns for halves and for seeds."""
    keys = ("spearman", "jaccard", "jaccard_by_source")
    lines = []
    for place in dict.fromkeys((row["set"], row["arm"]) for row in rows):
        some = {row["what"]: row for row in rows if (row["set"], row["arm"]) == place}
        lines.append([place[0], METHODS[place[1]], *(figure(some.get(what, {}), key) for what in WHAT for key in keys)])
    names = ("rank correlation", "best edges", "best targets")
    header = ["set", "method", *(f"{what}: {name}" for what in WHAT.values() for name in names)]
    return joined("### Stability", STABILITY_WORDS, table(header, lines))


def regulons(rows: list[dict]) -> str:
    """The best targets of each method in words, and how many of them the tables hold."""
    signs = {1: "+", -1: "-", 0: ""}

    def named(row: dict) -> str:
        said = [
            [f"{name[0].upper()}{signs[one[name]]}" for name in REFERENCES if name in one] for one in row["targets"]
        ]
        return ", ".join(
            one["target"] + (f" ({' '.join(marks)})" if marks else "")
            for one, marks in zip(row["targets"], said, strict=True)
        )

    lines = []
    for row in rows:
        hits = [f"{row[f'{name}_hits']} of {row[f'{name}_known']} ({chance(row, f'{name}_p')})" for name in REFERENCES]
        lines.append(
            [f"{row['set']} ({row['n_cells']:,} × {row['n_targets']:,})", METHODS[row["arm"]], *hits, named(row)]
        )
    header = ["set (cells × targets)", "method", *(f"in {name} (p)" for name in REFERENCES.values()), "best 20"]
    return joined(f"### The regulon of {rows[0]['gene']}", REGULON_WORDS, table(header, lines)) if rows else ""


def claims(of_regulon: list[dict], of_families: list[dict]) -> str:
    """Where the genes that the paper names stand in our graphs."""
    pairs = {(row["set"], row["arm"]): row.get("pair") for row in of_families if row.get("family") == "TNF"}
    lines = []
    for row in of_regulon:
        if row["arm"] in (*OURS, *REMOVED):
            ranks = [f"{rank:,}" if (rank := row["paper"].get(name)) else "not expressed" for name in PAPER_TARGETS]
            place = row["set"], row["arm"]
            pair = pairs.get(place)
            tnf = f"{pair['rank']:,} of {pair['of']:,}" if pair else "not expressed" if place in pairs else "-"
            lines.append([f"{row['set']} ({row['n_targets']:,})", METHODS[row["arm"]], *ranks, tnf])
    header = ["set (targets of SPI1)", "method", *PAPER_TARGETS, f"{PAPER_PAIR[1]}, target of {PAPER_PAIR[0]}"]
    return joined("### What the paper says of networks", PAPER_WORDS, table(header, lines)) if lines else ""


def speed(rows: list[dict]) -> str:
    """A line for each graph whose cost was measured."""
    lines = [
        [f"{METHODS[row['arm']]}: {row['n_cells']:,} cells × {row['n_genes']:,} genes, all pairs",
         f"{row['genes_per_cell']:,}", f"{row['wall_seconds']:,.0f}", *_sized(row)]
        for row in rows
    ]  # fmt: skip
    return joined("### Speed", SPEED_WORDS, table(["graph", "genes in a cell", "seconds", *COSTS], lines))


PARTS: dict[str, Callable[[list[dict]], str]] = {
    "edges": edges, "families": families, "modules": modules, "stability": stable, "regulon": regulons, "speed": speed,
}  # fmt: skip


def grn_tables(result: dict) -> list[str]:
    """The tables of each part that was run, and what they were made with."""
    rows = [row for row in result["rows"] if "arm" in row]
    of = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    parts = [write(of[part]) for part, write in PARTS.items() if of[part]]
    return [*parts, joined(made_at(rows))] if rows else []


def reported(result: dict) -> str:
    """What the paper says, marked as such, beside where its genes stand here."""
    rows = [row for row in result["rows"] if "arm" in row]
    of = {part: [row for row in rows if row["part"] == part] for part in ("regulon", "families")}
    return claims(of["regulon"], of["families"])

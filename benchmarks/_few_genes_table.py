"""The tables of what is left of an embedding where only some genes were measured."""

from __future__ import annotations

from _markdown import table

CUTS = {"hvg": "most variable", "expressed": "most counts", "random": "any"}
SIGNS = {
    "share_entropy": "share of the entropy of the model's genes",
    "n_known": "number of the model's genes",
    "share_weight": "share of the encoder's squared weights",
}


def few_genes(result: dict) -> str:
    """Cosine by cut, cosine by share of entropy, and what separates enough genes from too few."""
    rows = result["rows"]
    measured = ["genes of the model", "share of entropy", "cosine", "least", "largest", "cuts"]
    by_cut = [[f"{row['n_genes']:,}, {CUTS[row['kind']]}", *_figures(row)] for row in rows if "kind" in row]
    by_share = [[f"{row['above']:.0%} to {row['up_to']:.0%}", *_figures(row)] for row in rows if "above" in row]
    signs = [
        [
            SIGNS[row["sign"]],
            f"{row['auc']:.3f}",
            f"{row['least']:,.0f}" if row["least"] > 1 else f"{row['least']:.3f}",
            f"{row['right']:.1%}",
        ]
        for row in rows
        if "sign" in row
    ]
    return "\n".join([
        table(["genes kept", *measured], by_cut),
        table(["share of entropy", *measured], by_share),
        table(["predictor of a cosine of 0.95", "AUC", "best bound", "cuts classified correctly"], signs),
    ])  # fmt: skip


def _figures(row: dict) -> list[str]:
    cosines = [f"{row[key]:.3f}" for key in ("cosine", "cosine_least", "cosine_most")]
    return [f"{row['n_known']:,}", f"{row['share_entropy']:.1%}", *cosines, str(row["n_cuts"])]

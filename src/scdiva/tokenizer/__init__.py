"""Conversion of gene names and counts to tokens, without torch."""

from scdiva.tokenizer.names import human_orthologs, looks_like_mouse
from scdiva.tokenizer.vocabulary import GeneMatch, Vocabulary, load_vocabulary

__all__ = ["GeneMatch", "Vocabulary", "human_orthologs", "load_vocabulary", "looks_like_mouse"]

"""From gene names and counts to tokens: numpy, scipy and pandas only."""

from scdiva.tokenizer.names import looks_like_mouse
from scdiva.tokenizer.orthologs import human_orthologs
from scdiva.tokenizer.vocabulary import GeneMatch, Vocabulary, load_vocabulary

__all__ = ["GeneMatch", "Vocabulary", "human_orthologs", "load_vocabulary", "looks_like_mouse"]

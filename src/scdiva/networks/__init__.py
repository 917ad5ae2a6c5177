"""Gene networks: which genes and cells take part, and what each method makes of them; called by `scdiva.tl`."""

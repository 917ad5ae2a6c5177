"""Gene networks: methods, modules and regulons."""

"""The process that writes to the terminal of ``elasticrun`` while a live line is at its bottom."""

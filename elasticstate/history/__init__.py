"""Histories of jobs, read from event files: ``elasticrun trace`` and ``elasticrun report``."""

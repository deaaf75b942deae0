"""Histories of jobs, read from event files: ``elasticrun trace``, ``elasticrun report`` and ``elasticrun verify``."""

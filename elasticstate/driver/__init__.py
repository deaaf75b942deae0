"""The driver: one process per job. It finds hosts, starts agents, reports events, and runs the core."""

"""The driver: one per job. The shell around the core: finds hosts, starts agents, tells people what happens."""

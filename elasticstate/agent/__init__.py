"""The agent: one process per host. It starts workers, watches them, and carries words between them and the driver."""

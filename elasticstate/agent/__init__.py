"""The agent: one process per host. It starts and watches workers, and relays messages between them and the driver."""

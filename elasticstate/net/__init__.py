"""The control plane's wires: messages, gRPC between driver and agents, a Unix socket between agent and workers."""

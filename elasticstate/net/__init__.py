"""The network layer: messages, TLS connections between driver and agents, Unix sockets between agent and workers."""

"""The pure part: who is in the world, decided by one function without clock, socket or thread."""

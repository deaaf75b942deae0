"""The pure part: one function decides which workers form the world. It uses no clock, socket or thread."""

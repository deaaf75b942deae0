"""Values that a job commits, restores and syncs: states, their snapshots, and samplers that survive world changes."""

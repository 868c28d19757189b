"""A completed DAG becomes per-group ``shard_map`` programs, transfers and collectives in an explicit order."""

"""Single-device models: no word of parallelism. `shapes` is on the ground floor and needs no torch."""

"""Planning without devices: memory, FLOPs, step time, the search for a mesh, ahead-of-time compilation."""

"""The networks: Flax NNX modules that name logical axes. Knows no losses, adapters or meshes."""

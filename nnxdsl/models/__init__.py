"""The networks: nnx modules that name logical axes, and weights of the Hub in and out."""

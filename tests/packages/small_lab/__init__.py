"""What somebody else adds to nnxdsl in files of their own: a small network, and an objective."""

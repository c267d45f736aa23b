"""`python -m app`: the same as `nnxdsl app`."""

from .command import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m nnxdsl`."""

import sys


def main() -> int:
    """Runs the command line, or prints one message where there is not enough memory to load it."""
    try:
        from nnxdsl.cli import main as command  # noqa: PLC0415 - so that the error can be printed
    except (MemoryError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error or 'out of memory'}; nnxdsl could not be loaded\n")
        return 1
    return command()


if __name__ == "__main__":
    raise SystemExit(main())

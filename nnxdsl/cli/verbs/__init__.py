"""One module per verb: its docstring is the help text; it defines `add_arguments(parser)` and `run(args)`."""

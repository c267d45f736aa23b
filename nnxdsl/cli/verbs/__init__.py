"""One module a verb: its docstring is the help, `add_arguments(parser)` and `run(args)` are what it does."""

"""What every class of the DSL is built on: the base class, field types, validators, JSON, generated Python, run ids."""

"""Many experiments from one: running them, tables and plots of their results, Optuna searches."""

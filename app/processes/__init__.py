"""Child processes: runs, the queue, jobs and the worker of models."""

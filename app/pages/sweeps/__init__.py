"""The Sweeps page: points of a sweep or search, and what their fields do to a metric."""

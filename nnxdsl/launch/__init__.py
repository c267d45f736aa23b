"""Starting runs as processes of their own, locally or on a cluster: one file per engine."""

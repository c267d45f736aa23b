"""The page that compares what policy and reference write."""

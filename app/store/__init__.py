"""What the app reads and keeps: runs, metrics, drafts, tags, votes, presets."""

"""The page of a plan: where every array lives, and whether it fits."""

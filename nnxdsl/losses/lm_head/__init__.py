"""The output head in vocabulary tiles: log-probabilities and token statistics without whole logits."""

"""Online training, from prompts to a batch to learn from: completions are sampled, rewarded and given advantages."""

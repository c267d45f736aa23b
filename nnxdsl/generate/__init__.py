"""Generation: sampling, inference with pretrained models, comparison of policy and reference."""

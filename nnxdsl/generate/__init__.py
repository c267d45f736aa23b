"""Text from models: sampling, a pretrained model alone, policy and reference side by side."""

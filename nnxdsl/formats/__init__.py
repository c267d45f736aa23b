"""Other people's files: safetensors, Hugging Face checkpoints, PEFT adapters, Linen trees, quantized tensors."""

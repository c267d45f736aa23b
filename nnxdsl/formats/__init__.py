"""File formats of other libraries: safetensors, Hugging Face checkpoints, PEFT, Linen trees, quantized tensors."""

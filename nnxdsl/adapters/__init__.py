"""LoRA and DoRA, weight-only quantization and quantized training, put on a model from outside."""

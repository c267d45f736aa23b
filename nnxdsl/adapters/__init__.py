"""LoRA and DoRA, weight-only quantization and quantized training of models."""

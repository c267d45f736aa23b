"""What is known before a device is touched: memory, FLOPs, step time, the best mesh, ahead-of-time compilation."""

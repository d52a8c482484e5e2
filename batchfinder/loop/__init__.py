"""The largest batch size for a training loop of one's own, in plain PyTorch."""

"""The largest batch size for a Trainer of transformers."""

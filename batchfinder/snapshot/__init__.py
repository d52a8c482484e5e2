"""Capture everything a training step can change, and put it back bit for bit."""

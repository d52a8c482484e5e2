"""Capture everything a training step can change, and put it back in place, bit for bit."""

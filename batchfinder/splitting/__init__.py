"""A batch in parts: its samples, its parts, their lengths and weights, and whether it may be split at all."""

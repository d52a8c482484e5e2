"""The largest batch sizes of many models and cards, and what one size takes: what the commands answer."""

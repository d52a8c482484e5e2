"""Published memory figures, with what batchfinder says for the same training."""

"""Find the largest batch size that trains, with or without a GPU at hand."""

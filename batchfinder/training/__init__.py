"""ONE training step, as the user runs it."""

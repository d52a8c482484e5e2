"""torchao's tables of low-bit optimizers, and of the optimizer on the CPU."""

"""Training with a batch split into micro-batches of several lengths, and recovery from running out of memory."""

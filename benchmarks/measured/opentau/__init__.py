"""OpenTau's ladders of micro-batches under ZeRO."""

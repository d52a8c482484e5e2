"""LLM Foundry's micro-batches under FSDP."""

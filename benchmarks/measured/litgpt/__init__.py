"""LitGPT's LoRA fine-tuning on one A100."""

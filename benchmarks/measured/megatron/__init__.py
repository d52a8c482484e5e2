"""Megatron-LM's functional tests of its layers in plain PyTorch."""

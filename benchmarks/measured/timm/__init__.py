"""timm's training benchmark on an RTX 3090."""

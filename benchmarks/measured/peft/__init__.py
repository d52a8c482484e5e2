"""peft's own comparison of its methods."""

"""transformers' guide to training on one GPU: nine ways to train BERT-large on a V100."""

"""The models of the published tables, written for the memory they take. They import torch; nothing else here does."""

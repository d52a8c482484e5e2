"""Why the stub cannot be had, in one sentence."""


class StubUnavailable(Exception):
    """PyTorch's CUDA build cannot be run on the stub here; its words say why, and what to do."""

"""Recording on PyTorch's own CUDA build, which runs on the stub libraries of `batchfinder.cuda_stub`."""

"""xMem's jobs, with what five estimators said of them."""

import torch

# Where PyTorch is built without CUDA, torchvision's wheel from PyPI cannot load its operators, and misses these. It is
# imported by transformers where it is installed.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

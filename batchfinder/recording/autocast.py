"""CUDA's autocast policy, for the fake GPU.

PyTorch keeps the lists of operators per policy in `aten/src/ATen/autocast_mode.h` as macros for any backend to use
(https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP and the
lists after it). What each policy does is in the same file; what is cached and what is banned is in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/autocast_mode.cpp. A cast of a leaf fp32 parameter is kept
until the outermost autocast region ends: this is why a mixed-precision step holds half-precision copies of the weights.
"""

from __future__ import annotations

import functools
import weakref
from functools import partial
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from batchfinder.recording.fake_device import DEVICE_TYPE


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _split("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
FP32 = _split("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""")
FP32_SET_OPT_DTYPE = _split("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
PROMOTE = _split("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
# The overload that takes the output's type, for those that are sent to another overload.
FP32_APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_cache: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}


@functools.cache
def register() -> Library:
    """Install the policies on the fake GPU's autocast key, for as long as the library returned is held."""
    others = Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(fallthrough_kernel)
    library = Library("aten", "IMPL", "AutocastPrivateUse1")
    for policy, names in (
        ("lower_precision", LOWER_PRECISION),
        ("fp32", FP32),
        ("fp32_set_opt_dtype", FP32_SET_OPT_DTYPE),
        ("promote", PROMOTE),
        ("fp32_append_dtype", FP32_APPEND_DTYPE),
    ):
        for name in names:
            operator = _find(name)
            if operator is not None:
                library.impl(name, partial(_run, policy, operator))

    def refuse_bce(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "binary_cross_entropy (BCELoss) is refused under autocast, on CUDA as here: "
            "use binary_cross_entropy_with_logits (BCEWithLogitsLoss) and leave out the sigmoid"
        )

    library.impl("binary_cross_entropy", refuse_bce)
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _cache.clear()
        clear()

    torch.clear_autocast_cache = clear_both  # PyTorch calls it at the end of the outermost region

    # Code that is written for CUDA asks by that name, or by none, which means the same.
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled(DEVICE_TYPE if device_type == "cuda" else device_type)

    def autocast_dtype(device_type: str = "cuda") -> torch.dtype:
        return dtype_of(DEVICE_TYPE if device_type == "cuda" else device_type)

    torch.is_autocast_enabled, torch.get_autocast_dtype = is_enabled, autocast_dtype
    library.others = others  # type: ignore[attr-defined]
    return library


def _find(name: str) -> Any:
    packet, _, overload = name.partition(".")
    packet_found = getattr(torch.ops.aten, packet, None)
    return getattr(packet_found, overload or "default", None) if packet_found is not None else None


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == DEVICE_TYPE
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """One argument in `dtype`, from the cache where CUDA would have it there."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if not _eligible(value) or value.dtype is dtype:
        return value
    keep = (
        dtype is torch.get_autocast_dtype(DEVICE_TYPE)
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not keep:
        return value.to(dtype)
    known = _cache.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    cast = value.to(dtype)
    _cache[id(value)] = (weakref.ref(value), cast)
    return cast


def _run(policy: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator under a policy, by the names of `CastPolicy` in autocast_mode.h."""
    with torch._C._ExcludeDispatchKeyGuard(_KEY):
        # The input itself is not copied where an operator takes the output's type: fp32 is asked for there.
        if policy == "fp32_set_opt_dtype":
            place = [argument.name for argument in operator._schema.arguments].index("dtype")
            given = kwargs.get("dtype", args[place] if len(args) > place else None)
            if given is None and _eligible(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)
        if policy == "fp32_append_dtype":
            rest = operator._schema.arguments[len(args) :]
            filled = [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]
            typed = _find(FP32_APPEND_DTYPE[str(operator).removeprefix("aten.")])
            return typed(*filled, dtype=torch.float32 if _eligible(args[0]) else args[0].dtype)

        dtype = torch.get_autocast_dtype(DEVICE_TYPE)
        if policy == "fp32":
            dtype = torch.float32
        elif policy == "promote":
            flat = [item for value in args for item in (value if isinstance(value, (list, tuple)) else [value])]
            if any(_eligible(value) and value.dtype is torch.float32 for value in flat):
                dtype = torch.float32
        # C++ computes the arguments of a call from right to left.
        names = reversed(kwargs)
        cast = {name: _cast(kwargs[name], dtype) for name in names}
        values = [_cast(value, dtype) for value in reversed(args)]
        return operator(*reversed(values), **cast)

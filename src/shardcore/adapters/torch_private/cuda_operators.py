"""Operators without public names that torch runs on CUDA only: no run on a CPU finds them."""

import torch

aten = torch.ops.aten

# torch 2.13: `scaled_dot_product_attention` chooses one of three by dtype, sizes, mask and device.
FLASH_ATTENTION = aten._scaled_dot_product_flash_attention.default
FLASH_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_ATTENTION_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN_ATTENTION = aten._scaled_dot_product_cudnn_attention.default
CUDNN_ATTENTION_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default

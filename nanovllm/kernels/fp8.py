"""The 8-bit floating-point format of weights, tokens and the KV cache: e4m3, which has NaN but no infinity.

A number is stored as data * scale, scale in fp32. A quantizer either chooses scales so that no number exceeds the
largest e4m3, or saturates: torch converts a larger number to NaN.
"""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

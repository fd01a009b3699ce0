"""The 8-bit floating-point format of weights, tokens and the KV cache: e4m3, which has NaN but no infinity.

A number is stored as data * scale, scale in fp32. Who quantizes chooses scales with which nothing exceeds the largest
e4m3, or saturates: torch's conversion of a larger number gives NaN.
"""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

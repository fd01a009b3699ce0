"""Transformers' registry of attention functions: the calls of a model, recorded at a start and served in a step.

Owns the registration and whom a thread's calls go to: a ``Recorder`` at the start, later the step that runs.

T tokens, H query heads, K KV heads, D head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import unwrap
from threading import local
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.transformers_backend.config import refusal

PAGED, RECORDED = "nanovllm", "nanovllm_recorded"  # names in transformers' registry
# Arguments of an attention call that are honoured, or change nothing here; a model that gives others is refused.
KNOWN = frozenset((
    "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position",
    "position_embeddings", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "layer_idx",
))  # fmt: skip
MASK_ROWS = 97  # rows of the longest request's mask that are read
serving = local()  # ``step``: takes this thread's attention calls


class Call(NamedTuple):
    """An attention call of a forward pass."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none

    @property
    def head_dim(self) -> int:
        return max(self.key_dim, self.value_dim)


class Mask(NamedTuple):
    """A mask that transformers made for a recorded prompt."""

    allowed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (query [Q, 1], key [1, T]) -> bool [Q, T]
    window: int | None  # None: it is no causal window
    additive: torch.Tensor  # [1, 1, T, T]


@contextmanager
def serving_calls(step: Callable[..., Any]) -> Iterator[None]:
    """Send this thread's attention calls to ``step``."""
    before, serving.step = getattr(serving, "step", None), step
    try:
        yield
    finally:
        serving.step = before


@cache
def register() -> None:
    """Make ``PAGED`` and ``RECORDED`` known to transformers; it makes masks for the latter alone."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(*args: Any, **kwargs: Any) -> Any:
        return serving.step(*args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return serving.step.make_mask(**kwargs)

    AttentionInterface.register(PAGED, attend)
    AttentionInterface.register(RECORDED, attend)
    AttentionMaskInterface.register(RECORDED, mask)


def own_attention(module: nn.Module) -> Callable[..., Any] | None:
    """The plain attention function of the file that defines ``module``; None where it has none."""
    return getattr(unwrap(type(module).forward), "__globals__", {}).get("eager_attention_forward")


class NoCounting(TorchFunctionMode):
    """Refuses a model whose attention counts positions itself, since it would count the tokens of a packed batch.

    Numbers need not show it at a start: Llama 4 scales queries by positions divided by 8,192.
    """

    def __init__(self, name: str):
        super().__init__()
        self._name, self._depth = name, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.arange and self._depth:
            raise refusal(self._name, "its attention counts positions itself")
        return function(*args, **(kwargs or {}))

    def within(self, module: nn.Module) -> list[Any]:
        """Hooks on a module that must not count; this library's layers in it may."""
        moves = [(module, 1), *((part, -1) for part in module.modules() if isinstance(part, ReplicatedLinear))]
        before = [part.register_forward_pre_hook(partial(self._move, step)) for part, step in moves]
        return before + [part.register_forward_hook(partial(self._move, -step)) for part, step in moves]

    def _move(self, step: int, *args: Any) -> None:
        self._depth += step


class Recorder:
    """Serves one prompt by transformers' own attention in fp32, and records each call.

    Args:
        name: architecture, for errors.
        max_model_len: most tokens of a request.
        observe: called with each call, its mask, q, k, v and transformers' result, [1, T, H, D] in fp32.
    """

    def __init__(self, name: str, max_model_len: int, observe: Callable[..., None] | None = None):
        self.name, self._max_model_len, self._observe, self.calls = name, max_model_len, observe, list[Call]()
        self._masks: dict[int, Mask] = {}  # by the address of ``additive``, which they keep alive

    def make_mask(self, q_length: int, kv_length: int, mask_function: Callable, device: Any, dtype: torch.dtype,
                  q_offset: Any = 0, **kwargs: Any) -> torch.Tensor:
        """An additive mask [1, 1, q, kv]. Its window holds for requests of any length."""

        def allowed(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            zero = torch.zeros((), dtype=torch.long, device=q.device)
            return torch.as_tensor(mask_function(zero, zero, q, kv), device=q.device).expand(len(q), kv.shape[1])

        keys = torch.arange(max(self._max_model_len, kv_length), device=device)[None]
        last = keys.shape[1] - 1
        rows = torch.tensor(sorted({1, last - 1, *range(0, last, last // MASK_ROWS + 1), last}), device=device)[:, None]
        given = allowed(rows, keys)
        window, width = None, int(given[-1].sum())  # width of the last row
        if torch.equal(given, (keys <= rows) & (keys > rows - width)):
            window = width if width <= last else 0
        seen = allowed(torch.arange(q_length, device=device)[:, None], keys[:, :kv_length])
        additive = torch.zeros(1, 1, q_length, kv_length, dtype=dtype, device=device)
        additive.masked_fill_(~seen, torch.finfo(dtype).min)
        self._masks[additive.untyped_storage().data_ptr()] = Mask(allowed, window, additive)
        return additive

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 attention_mask: Any = None, scaling: float | None = None, softcap: float | None = None,
                 **kwargs: Any) -> tuple[torch.Tensor, None]:
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        what = f"the attention of {type(module).__name__}"
        others = [name for name in kwargs.keys() - KNOWN if kwargs[name] is not None and kwargs[name] is not False]
        if others:
            raise refusal(self.name, f"{what} takes {', '.join(sorted(others))}")
        if query.shape[2] != key.shape[2] or len(query) != 1:
            raise refusal(self.name, f"{what} attends other tokens than the prompt's")
        address = attention_mask.untyped_storage().data_ptr() if isinstance(attention_mask, torch.Tensor) else None
        if address not in self._masks:
            raise refusal(self.name, f"{what} has a mask of its own, or none")
        mask = self._masks[address]
        if mask.window is None:
            raise refusal(self.name, f"with max_model_len={self._max_model_len} its tokens attend others than a window")
        if not torch.equal(attention_mask.expand(mask.additive.shape), mask.additive):
            raise refusal(self.name, f"{what} changes its mask")
        own = own_attention(module)
        if own is None:
            raise refusal(self.name, f"{what} has no plain function to compare with")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        sizes = query.shape[1], key.shape[1], key.shape[-1], value.shape[-1]
        call = Call(module, *sizes, scale, mask.window, float(softcap or 0))
        self.calls.append(call)
        asked = {"scaling": scaling, **({} if softcap is None else {"softcap": softcap}), **kwargs, "dropout": 0.0}
        serve = partial(in_fp32, own, module, asked)
        out = serve(query, key, value, mask.additive)
        if self._observe is not None:
            self._observe(call, mask, query, key, value, out, kwargs.get("s_aux"), serve)
        return out.to(query.dtype), None


def in_fp32(own: Callable[..., Any], module: nn.Module, asked: dict[str, Any], query: torch.Tensor, key: torch.Tensor,
            value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Transformers' attention function on fp32 inputs -> fp32 [1, T, H, D]."""
    for name, x in asked.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            asked = {**asked, name: x.float()}
    return own(module, query.float(), key.float(), value.float(), mask.float(), **asked)[0].float()

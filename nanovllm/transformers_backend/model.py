"""``TransformersCausalLM``: a decoder of transformers that stores and attends keys and values in the paged KV cache.

Transformers' modules send each attention call to ``Paged``. A recorded forward pass has told which calls come, in which
order and with which heads, scale, window and softcap: each is an ``Attention`` of this library. ``compute_logits`` runs
transformers' own head, with whatever scales or caps its logits.

T packed tokens, N sampled tokens, C hidden size, H query heads, K KV heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.distributed.group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.context import Context
from nanovllm.transformers_backend.build import build
from nanovllm.transformers_backend.config import TransformersConfig, refusal
from nanovllm.transformers_backend.interface import (
    PAGED,
    RECORDED,
    Call,
    NoCounting,
    Recorder,
    register,
    serving_calls,
)
from nanovllm.transformers_backend.names import Names
from nanovllm.utils.checkpoint import LOADING_LOCK

PROMPT_LENGTHS = 23, 17  # tokens of the prompts that are recorded


@cache
def given_output() -> Any:
    """The class of a decoder's output that has hidden states, and None for everything else."""
    from transformers.modeling_outputs import BaseModelOutput

    class Given(BaseModelOutput):
        def __getattr__(self, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)

    return Given


class Paged:
    """Serves the attention calls of one step, in the recorded order."""

    def __init__(self, owner: "TransformersCausalLM", context: Context):
        self._owner, self._context, self._layers = owner, context, iter(owner.attentions)

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 attention_mask: Any = None, s_aux: torch.Tensor | None = None,
                 **kwargs: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = self._owner.attend(next(self._layers), q, k, v, self._context, s_aux)
        return out[None], None


class TransformersCausalLM(nn.Module):
    """Built on torch's default device and dtype, weights uninitialised; ``proof.prove`` follows once they are there.

    Attributes:
        model: transformers' model for causal LM.
        attentions: one for each attention call of a forward pass, in order.
        calls: the same as they were recorded.
    """

    unrotated: torch.Tensor
    attentions: Any
    model: Any

    def __init__(self, config: TransformersConfig, backend: AttentionBackend, tp: TPGroup):
        super().__init__()
        self.config, self.ops, self._backend = config, kernels.select(), backend
        device = torch.empty(0).device
        with LOADING_LOCK:
            register()
        self.tp = tp
        self.model = build(config, torch.get_default_dtype(), device, tp)
        names = Names(self.model)
        self.checkpoint_name, self.schemes = names.here, self.model.schemes  # as the loader asks for them
        self.copies_of_embedding = names.copies_of_embedding
        self._decoders: list[Any] = []  # a list, so that they are no second submodule
        self._parts: dict[str, Any] = {}  # submodules that are models themselves
        self._runs: set[Any] = set()  # modules that run for text
        self._pin_rope()
        self.calls = self._record(device)
        names.unused_modules |= self._drop_towers()
        num_kv_heads = max(call.num_kv_heads for call in self.calls)  # blocks are of one shape
        head_dim = self.ops.padded_head_dim(max(call.head_dim for call in self.calls))
        for call in self.calls:
            if call.num_heads % num_kv_heads or num_kv_heads % call.num_kv_heads:
                heads = f"{call.num_heads} heads, and {call.num_kv_heads} of {num_kv_heads} KV heads"
                raise refusal(config.architecture, f"a layer has {heads}")
        self.attentions = nn.ModuleList(
            Attention(call.num_heads, head_dim, num_kv_heads, backend, call.scale, call.window, softcap=call.softcap)
            for call in self.calls
        )
        table = torch.cat([torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)], 1).float()
        self.register_buffer("unrotated", table.to(device), persistent=False)  # cosines and sines of no rotation

    # ---------------------------------------------------------------- what a forward pass asks for

    def _pin_rope(self) -> None:
        """Give longrope the frequencies of ``max_model_len``; refuse others that depend on a batch's longest request.

        A packed batch has requests of any length, and one table of frequencies.
        """
        last = self.config.max_model_len - 1
        for module in self.model.modules():
            kind = getattr(module, "rope_type", None)
            for layer_type in kind if isinstance(kind, dict) else [kind] if kind else []:
                of_layers = {"layer_type": layer_type} if isinstance(kind, dict) else {}
                with suppress(TypeError), self.refusing("its RoPE cannot be called", TypeError):  # a vision tower's
                    far = module(torch.zeros(1, 1, 1), torch.tensor([[1, last]]), **of_layers)
                    if kind == "longrope":
                        module.rope_type = "default"  # with the frequencies that it has now
                    near = module(torch.zeros(1, 1, 1), torch.tensor([[1, 2]]), **of_layers)
                    far, near = (x if isinstance(x, tuple) else (x,) for x in (far, near))
                    if not all(torch.equal(x[:, 0], y[:, 0]) for x, y in zip(far, near, strict=True)):
                        raise refusal(self.config.architecture, "its RoPE changes with the longest request of a batch")

    def _record(self, device: torch.device) -> list[Call]:
        """The attention calls of a forward pass, and the decoder that makes them."""
        from transformers import PreTrainedModel

        decoders: list[Any] = []

        def note(part: nn.Module, args: Any, output: Any) -> None:
            self._runs.add(part)
            if hasattr(output, "last_hidden_state"):
                decoders.append(part)

        self._parts = {
            path: part for path, part in self.model.named_modules()
            if isinstance(part, PreTrainedModel) and part is not self.model
        }  # fmt: skip
        hooks = [part.register_forward_hook(note) for part in self._parts.values()]
        recorded = []
        for ids in self.prompts(device):
            recorder, counting = Recorder(self.name, self.config.max_model_len), NoCounting(self.name)
            self.logits(ids, RECORDED, recorder)
            recorded.append(recorder.calls)
            hooks += [hook for call in {call.module: call for call in recorder.calls} for hook in counting.within(call)]
            with counting:
                self.logits(ids, RECORDED, Recorder(self.name, self.config.max_model_len))
        for hook in hooks:
            hook.remove()
        self.model.set_attn_implementation(PAGED)
        if not recorded[0] or recorded[0] != recorded[1]:
            raise refusal(self.name, "no layer calls attention, or not each time the same")
        if not decoders:
            raise refusal(self.name, "its decoder is no module of its own")
        self._decoders.append(decoders[-1])  # the outermost ends last
        return recorded[0]

    def _drop_towers(self) -> set[str]:
        """Take out the models within this one that text does not run, such as a vision tower; returns their names."""
        dropped = set[str]()
        for path, part in self._parts.items():
            if self._runs.isdisjoint(part.modules()) and not any(path.startswith(f"{each}.") for each in dropped):
                dropped.add(path)
                parent, _, name = path.rpartition(".")
                setattr(self.model.get_submodule(parent), name, None)
        self._parts.clear()  # they would stay in memory
        self._runs.clear()
        return dropped

    @property
    def name(self) -> str:
        return self.config.architecture

    def prompts(self, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
        """Random token ids of two prompts."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return [
            torch.randint(self.config.vocab_size, (n,), generator=generator, device="cpu").to(device)
            for n in PROMPT_LENGTHS
        ]

    def logits(self, ids: torch.Tensor, attention: str, step: Any = None) -> torch.Tensor:
        """Logits of one prompt, fp32 [T, V], by transformers' forward pass with an attention of its registry."""
        self.model.set_attn_implementation(attention)
        try:
            with self.refusing("transformers' forward pass fails"), serving_calls(step):
                return self.model(input_ids=ids[None], use_cache=False).logits[0].float()
        finally:
            self.model.set_attn_implementation(PAGED)

    @contextmanager
    def refusing(self, what: str, *passed: type[Exception]) -> Iterator[None]:
        """Errors of transformers' modules refuse the model; the classes in ``passed`` are raised unchanged."""
        raised: tuple[type[Exception], ...] = (torch.OutOfMemoryError, CheckpointError, *passed)
        try:
            yield
        except raised:
            raise
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError,
                ValueError) as error:  # fmt: skip
            raise refusal(self.name, f"{what} ({error!r:.300})") from error

    # ---------------------------------------------------------------- a step

    def forward(self, input_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """input_ids [T] -> hidden states [T, C]; [N, C] with ``context.logits_indices``."""
        with serving_calls(Paged(self, context)):
            hidden = self._decoders[0](
                input_ids=input_ids.long()[None], position_ids=context.positions.long()[None], use_cache=False
            ).last_hidden_state[0]  # fmt: skip
        return hidden if context.logits_indices is None else hidden[context.logits_indices]

    def attend(self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context,
               sinks: torch.Tensor | None) -> torch.Tensor:
        """Store k [T, K, D] and v [T, K, Dv], and attend with q [T, H, D] -> [T, H, Dv].

        Smaller heads than a block's are padded with zeros, fewer KV heads repeated.
        """
        num_heads, width, size = q.shape[1], v.shape[-1], layer.head_dim
        if k.shape[1] < layer.num_kv_heads:
            k, v = (x.repeat_interleave(layer.num_kv_heads // x.shape[1], 1) for x in (k, v))
        q, k, v = (F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in (q, k, v))
        if layer.k_cache.numel():
            slots = context.slot_mapping
            zeros = torch.zeros_like(slots)  # before the launch of ``cat``: the kernel reads positions before it waits
            self.ops.norm_rope_store(
                torch.cat([k, v], 1).flatten(1), None, None, 0.0, self.unrotated, zeros, slots, layer.k_cache,
                layer.v_cache, 0, layer.num_kv_heads, layer.kv_scale,
            )  # fmt: skip
        out = layer(q.contiguous(), context, sinks)
        return out.view(len(q), num_heads, size)[..., :width]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> logits of this rank's part of the vocabulary, [N, V / size].

        By transformers' forward pass around a decoder that returns the states; every rank has the whole head.
        """
        decoder, output = self._decoders[0], given_output()
        decoder.forward = lambda *args, **kwargs: output(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del decoder.forward
        return logits if self.tp.size == 1 else logits.chunk(self.tp.size, -1)[self.tp.rank].contiguous()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Under their names in transformers, as in checkpoints."""
        return self.model.named_parameters(*args, **kwargs)

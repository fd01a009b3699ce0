"""PyTorch references of the mixture-of-experts kernels: the CPU backend and the oracle of the kernels' tests.

Owns the meaning of each operation and the values `Routing` and `Biases`. Knows nothing of layers, shards or devices.

T packed tokens, C channels, E experts, I intermediate units of an expert (of this rank), k experts of a token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..linear.reference import Weight, fused_linear, rms_norm

SWIGLU_ALPHA = 1.702  # see `clamped_swiglu`


class Routing(NamedTuple):
    """How a token chooses its experts."""

    top_k: int
    scoring: str = "softmax"  # over all experts, or "sigmoid"
    renormalize: bool = True  # the weights of the chosen experts sum to 1
    routed_scale: float = 1.0  # a factor of the weights
    num_groups: int = 1  # groups of E / num_groups neighbouring experts each
    top_groups: int = 1  # groups from which a token chooses: those with the largest sums of their two best scores
    sum_eps: float = 1e-20  # added to the sum of the chosen scores, which may be 0


class Shared(NamedTuple):
    """The weights of a shared expert."""

    gate_up: Weight  # [2I, C], gate features before up features
    down: Weight  # [C, I]
    gate: torch.Tensor | None  # [1, C], see `add_shared_expert`


class Biases(NamedTuple):
    """Biases of the router and of the experts."""

    router: torch.Tensor  # [E], to the logits
    gate_up: torch.Tensor  # [E, 2I]
    down: torch.Tensor  # [E, C]


def route(logits, correction_bias, routing, slot_mapping, expert_scales=None):
    """The experts of each token, the best first, and their weights.

    Args:
        logits: [T, E], scored in fp32.
        correction_bias: fp32 [E] or None, added to the scores for the choice only.
        slot_mapping: i32[T]; a row with a negative slot is padding and chooses no expert.
        expert_scales: [E] or None, factors of the weights.

    Returns:
        ids i32[T, k] and weights fp32 [T, k]; -1 and 0 in rows of padding. Of equal scores, and of equal groups, the
        lowest index wins.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if routing.top_groups < routing.num_groups:
        grouped = choice.unflatten(1, (routing.num_groups, -1))  # [T, groups, E / groups]
        group_scores = grouped.topk(min(2, grouped.shape[2])).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, best(group_scores, routing.top_groups), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    ids = best(choice, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.sum_eps)
    weights = weights if expert_scales is None else weights * expert_scales[ids]
    is_padding = (slot_mapping < 0).unsqueeze(1)
    return ids.int().masked_fill(is_padding, -1), (weights * routing.routed_scale).masked_fill(is_padding, 0.0)


def best(scores, count):
    """Indices of the `count` largest scores of each row, i64 [T, count]; torch.topk does not say how it breaks ties."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def fused_moe(
    residual, norm_weight, eps, router_weight, correction_bias, gate_up, down, routing, slot_mapping, act="silu",
    add_residual=True, allow_split_k=False, base=None, biases=None, limit=0.0, shared=None,
    router_norm_weight=None, expert_scales=None,
):  # fmt: skip
    """[residual +] the weighted sum of each token's experts, down(act(gate(x)) * up(x)), of x = rms_norm(residual).

    Args:
        residual: [T, C].
        norm_weight: [C], or None for x = residual; with its eps.
        router_weight: [E, C]; the logits are computed in residual.dtype, in fp32 for sigmoid or biased scores.
        correction_bias, routing, slot_mapping: as in `route`; rows of padding get a sum of zeros.
        gate_up: Weight, [E, 2I, C], gate features before up features; with the act "relu2" [E, I, C], without a gate.
        down: Weight, [E, C, I].
        act: as in `act_and_mul`.
        base: [T, C], is added in place of `residual`.
        biases: Biases, or None.
        limit: 0, or the limit of `clamped_swiglu`, which replaces act(gate) * up.
        router_norm_weight: [C], the router takes rms_norm(residual) with this weight in place of x; None: it takes x.
        expert_scales: as in `route`.
        shared: Shared, whose result is added, if `takes_shared_expert`. Else None: `base` holds its result, if any.

    The kernels may keep intermediate results in fp32 and overwrite `residual`. With allow_split_k they may return
    SplitKPartials (linear/norm.py).
    """
    x = residual if norm_weight is None else rms_norm(residual, norm_weight, eps)
    dtype = torch.float32 if routing.scoring == "sigmoid" or correction_bias is not None else x.dtype
    routed = x if router_norm_weight is None else rms_norm(residual, router_norm_weight, eps)
    logits = F.linear(routed.to(dtype), router_weight.to(dtype), None if biases is None else biases.router.to(dtype))
    ids, weights = route(logits, correction_bias, routing, slot_mapping, expert_scales)
    of_experts = (None, None) if biases is None else (biases.gate_up, biases.down)
    total = chosen_experts(x, gate_up, down, ids, weights, act, biases=of_experts, limit=limit)
    base = residual if base is None else base
    if shared is not None:
        hidden = fused_linear(x, shared.gate_up, act_mul=act)
        total += add_shared_expert(fused_linear(hidden, shared.down), residual, norm_weight, eps, shared.gate, False)
    return base + total if add_residual else total


def chosen_experts(x, gate_up, down, ids, weights, act="silu", norm_weight=None, eps=0.0, base=None,
                   allow_split_k=False, biases=(None, None), limit=0.0, shared=None):  # fmt: skip
    """[base +] the sum of each token's experts, down(act(gate(x)) * up(x)) times their weights.

    Args:
        x: [T, C].
        gate_up, down, act, limit: as in `fused_moe`.
        ids: i32[T, k], experts of each token; a negative one adds nothing.
        weights: fp32 [T, k].
        base: [T, C] or None.
        biases: of both products, [E, 2I] and [E, C], or None.

    `fused_moe` also gives the kernels its norm and its shared expert.
    """
    assert norm_weight is None and shared is None
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    # sorted by expert, the entries of [T, k] that choose the same expert are neighbours
    chosen, order = ids.flatten().sort(stable=True)
    experts, counts = (values.tolist() for values in chosen.unique_consecutive(return_counts=True))
    tokens, shares = order // ids.shape[1], weights.flatten()[order].unsqueeze(1)
    for expert, rows, share in zip(experts, tokens.split(counts), shares.split(counts), strict=True):
        if expert >= 0:
            of_gate_up, of_down = (None if bias is None else bias[expert] for bias in biases)
            is_gated = not limit and act != "relu2"
            hidden = fused_linear(x[rows], gate_up.expert(expert), of_gate_up, act_mul=act if is_gated else None)
            hidden = clamped_swiglu(hidden, limit) if limit else hidden
            hidden = hidden if act != "relu2" else hidden.relu().square()
            total.index_add_(0, rows, fused_linear(hidden, down.expert(expert), of_down) * share)
    total = total.to(x.dtype)
    return total if base is None else base + total


def takes_shared_expert(num_tokens, gate_up, shared_gate_up, routing):
    """Whether `fused_moe` takes the shared expert as one more of its experts. Takes gate_up of both."""
    return False


def takes_mxfp4():
    """Whether `fused_moe` multiplies MXFP4 weights as they are. Here it would dequantize them at each call."""
    return False


def clamped_swiglu(x, limit):
    """gpt-oss: x [T, 2I] -> gate * sigmoid(1.702 gate) * (up + 1), gate at most `limit`, up between -limit and limit.

    The first product is rounded to x.dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.float().clamp(max=limit)
    return (gate * (SWIGLU_ALPHA * gate).sigmoid()).to(x.dtype) * (up.clamp(-limit, limit) + 1)


def add_shared_expert(shared, residual, norm_weight, eps, gate_weight, add_residual):
    """[residual +] shared, all [T, C]; with `gate_weight` [1, C] shared is scaled by the sigmoid of x . gate_weight.

    x = rms_norm(residual).
    """
    if gate_weight is not None:
        x = rms_norm(residual, norm_weight, eps)
        shared = F.linear(x, gate_weight).sigmoid() * shared
    return residual + shared if add_residual else shared

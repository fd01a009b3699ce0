"""The requests that are timed, and model directories of the published sizes without weights.

Owns the definitions of "headline", "single", "prefill" and "sharedprefix". Knows nothing of engines, and
imports nothing heavy: ``bench.py`` times the imports of the engines.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

HEADLINE_TOKENS = (142_827, 133_966)  # prompt and generated tokens of the headline at scale 1

# hidden_size, intermediate_size, layers, attention heads (8 KV heads of 128 everywhere), tied embeddings
SIZES = {
    "0.6b": (1024, 3072, 28, 16, True),
    "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True),
    "8b": (4096, 12288, 36, 32, False),
    "14b": (5120, 17408, 40, 40, False),
    "32b": (5120, 25600, 64, 64, False),
}


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, how many tokens each of them generates, and which of them its rate counts."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    counts_prompts: bool  # the rate is of all tokens, not of generated ones

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def num_counted_tokens(self) -> int:
        return self.num_output_tokens + self.counts_prompts * self.num_prompt_tokens

    def redrawn(self, repeat: int, vocab_size: int) -> "Workload":
        """The same lengths with other token ids, so that a repeat does not hit the prefix cache.

        Repeat 0 keeps the ids as they are (but inside the vocabulary).
        """
        num_ids = min(10_001, vocab_size)
        prompts = [[(token + 1009 * repeat) % num_ids for token in prompt] for prompt in self.prompts]
        return Workload(self.name, prompts, self.max_tokens, self.counts_prompts)


def headline(scale: int = 1) -> Workload:
    """256 prompts of 100 to 1,024 tokens, each with 100 to 1,024 tokens to generate."""
    rng = Random(0)  # the draws of ``random.seed(0)``
    num, shortest, longest = 256 // scale, 100 // scale, 1024 // scale
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(shortest, longest))] for _ in range(num)]
    workload = Workload("headline", prompts, [rng.randint(shortest, longest) for _ in range(num)], False)
    totals = workload.num_prompt_tokens, workload.num_output_tokens
    if scale == 1 and totals != HEADLINE_TOKENS:
        raise AssertionError(f"the headline draws {totals} tokens, not {HEADLINE_TOKENS}: the generator has changed")
    return workload


def single(scale: int = 1) -> Workload:
    """One prompt of 128 tokens, 512 to generate."""
    rng = Random(1)
    return Workload("single", [[rng.randint(0, 10_000) for _ in range(128 // scale)]], [512 // scale], False)


def prefill(scale: int = 1) -> Workload:
    """128 prompts of 2,048 tokens, one token to generate."""
    rng = Random(2)
    num = 128 // scale
    prompts = [[rng.randint(0, 10_000) for _ in range(2048 // scale)] for _ in range(num)]
    return Workload("prefill", prompts, [1] * num, True)


def sharedprefix(scale: int = 1) -> Workload:
    """512 prompts that begin with the same 1,024 tokens and go on with 64 of their own, 64 to generate."""
    rng = Random(3)
    num, own = 512 // scale, max(1, 64 // scale)
    common = [rng.randint(0, 10_000) for _ in range(1024 // scale)]
    prompts = [common + [rng.randint(0, 10_000) for _ in range(own)] for _ in range(num)]
    return Workload("sharedprefix", prompts, [own] * num, True)


WORKLOADS = {make.__name__: make for make in (headline, single, prefill, sharedprefix)}


def write_model(directory: str | Path, size: str) -> str:
    """Write the ``config.json`` of a Qwen3 model of ``size`` (a key of SIZES); return the directory."""
    hidden, intermediate, layers, heads, tied = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "torch_dtype": "bfloat16",
    }
    Path(directory, "config.json").write_text(json.dumps(config, indent=2))
    return str(directory)

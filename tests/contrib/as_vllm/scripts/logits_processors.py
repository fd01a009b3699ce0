"""Logits processors of the engine: on batches, of requests, by name; and functions of a request's as vLLM once took."""

import sys
from types import ModuleType

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class OnlyTarget(LogitsProcessor):
    """All tokens but one are masked, in requests that name it."""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target!r} is not an int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        assert vllm_config.model_config.get_vocab_size() > 0 and not is_pin_memory and device.type == "cpu"
        self.req_info: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(
            self.req_info, batch_update, lambda params, _, __: (params.extra_args or {}).get("target_token")
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.req_info:
            return logits
        rows, cols = torch.tensor(list(self.req_info)), torch.tensor(list(self.req_info.values()))
        kept = logits[rows, cols].clone()
        logits[rows] = float("-inf")
        logits[rows, cols] = kept
        return logits


class InTurn:
    """A request's own, with a state: tokens 40, 41, 42, ..., then the end."""

    def __init__(self, n, eos):
        self.calls, self.n, self.eos = 0, n, eos

    def __call__(self, prompt_ids, output_ids, logits):
        assert len(output_ids) == self.calls and len(prompt_ids) > 0
        wanted = 40 + self.calls if self.calls < self.n else self.eos
        self.calls += 1
        logits[wanted] = logits.max() + 1000
        return logits


class Counting(AdapterLogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        super().__init__(vllm_config, device, is_pin_memory)
        self.eos = vllm_config.model_config.hf_config.eos_token_id

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        n = (params.extra_args or {}).get("count_to")
        return None if n is None else InTurn(n, self.eos)


class OwnMinP(OnlyTarget):
    """Sees the distribution after the temperature."""

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        process_dict_updates(self.req_info, batch_update, lambda params, _, __: (params.extra_args or {}).get("min_p"))

    def apply(self, logits):
        for row, min_p in self.req_info.items():
            probs = logits[row].softmax(-1)
            logits[row, probs < min_p * probs.max()] = float("-inf")
        return logits


module = sys.modules["mine"] = ModuleType("mine")
module.Counting, module.OwnMinP = Counting, OwnMinP
llm = LLM(model=sys.argv[1], logits_processors=[OnlyTarget, "mine:Counting", "mine.OwnMinP"], max_num_seqs=3,
          dtype="float32")  # fmt: skip
prompts = [f"{i} + 3" for i in range(6)]
plain = SamplingParams(temperature=0, max_tokens=6)
want = [output.outputs[0].token_ids for output in llm.generate(prompts, plain)]
count = SamplingParams(temperature=0, max_tokens=6, extra_args={"count_to": 4})
target = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args={"target_token": 77})
outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, [plain, target, count] * 2)]
counted = [40, 41, 42, 43]
assert outputs[0] == want[0] and outputs[3] == want[3]
assert outputs[1] == outputs[4] == [77] * 3
assert outputs[2][:4] == outputs[5][:4] == counted and len(outputs[2]) == 5, outputs
(output,) = llm.generate("1 + 1", SamplingParams(n=3, max_tokens=6, seed=1, extra_args={"count_to": 4}))
assert [each.token_ids[:4] for each in output.outputs] == [counted] * 3
# the same as nanovllm's own min_p
drawn = []
for name, value in {"extra_args": {"min_p": 0.2}, "min_p": 0.2, "top_p": 1}.items():
    params = SamplingParams(temperature=1.7, max_tokens=24, seed=3, ignore_eos=True, **{name: value})
    drawn.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
assert drawn[0] == drawn[1] != drawn[2]
with pytest.raises(ValueError, match="target_token 'x' is not an int"):
    llm.generate("1", SamplingParams(extra_args={"target_token": "x"}))
with pytest.raises(ValueError, match="beside the logits processor OwnMinP"):
    llm.generate("1", SamplingParams(presence_penalty=1))
del llm

llm = LLM(model=sys.argv[1])


def never_again(output_ids, logits):
    logits[list(output_ids)] = -torch.inf
    return logits


(output,) = llm.generate("2 + 3", SamplingParams(temperature=0, max_tokens=9, logits_processors=[never_again]))
assert len(set(output.outputs[0].token_ids)) == len(output.outputs[0].token_ids)
(output,) = llm.generate("2 + 3", SamplingParams(temperature=0, logits_processors=[lambda ids, logits: 1 / 0]))
assert output.outputs[0].finish_reason == "error"
for wrong, message in ((["no.such"], "cannot be imported"), ([int], "must be a class derived from LogitsProcessor")):
    with pytest.raises(ValueError, match=message):
        LLM(model=sys.argv[1], logits_processors=wrong)

entries = {0: "a", 1: "b", 2: "c"}
moves = [(2, 0, MoveDirectionality.UNIDIRECTIONAL), (0, 1, MoveDirectionality.SWAP)]
assert process_dict_updates(entries, BatchUpdate(3, [0], [(3, "d", None, [])], moves), lambda params, _, __: params)
assert entries == {0: "b", 1: "c", 3: "d"}

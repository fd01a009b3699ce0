"""What a small server does: cumulative outputs or deltas of each step, final ones only, and an abort."""

import sys
from itertools import chain, pairwise

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext

args = EngineArgs(model=sys.argv[1], disable_log_stats=True)
engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format


def params(kind, **more):
    return SamplingParams(temperature=0, max_tokens=40, output_kind=kind, **more)


engine.add_request("cumulative", chat("count to 12"), params(RequestOutputKind.CUMULATIVE))
engine.add_request("delta", chat("count to 12"), params(RequestOutputKind.DELTA))
engine.add_request("final", chat("count to 12"), params(RequestOutputKind.FINAL_ONLY))
engine.add_request("aborted", chat("count to 100"), params(RequestOutputKind.CUMULATIVE, ignore_eos=True))
seen = {"cumulative": [], "delta": [], "final": [], "aborted": []}
while engine.has_unfinished_requests():
    for output in engine.step():
        seen[output.request_id].append(output)
        if output.request_id == "aborted" and len(seen["aborted"]) == 3:
            engine.abort_request(["aborted", "no such request"])

text = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
texts = [o.outputs[0].text for o in seen["cumulative"]]
assert texts[-1] == text and all(b.startswith(a) for a, b in pairwise(texts)), texts
assert len(set(texts)) > 5
assert "".join(o.outputs[0].text for o in seen["delta"]) == text
ids = list(chain.from_iterable(o.outputs[0].token_ids for o in seen["delta"]))
assert ids == list(seen["cumulative"][-1].outputs[0].token_ids)
assert [o.outputs[0].text for o in seen["final"]] == [text]
assert len(seen["aborted"]) == 3 and not seen["aborted"][-1].finished
assert [len(seen[name]) and seen[name][-1].finished for name in ("cumulative", "delta", "final")] == [True] * 3
engine.engine_core.shutdown()

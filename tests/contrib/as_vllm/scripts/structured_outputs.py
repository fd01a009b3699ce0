"""Choice, regular expression, JSON schema and grammar."""

import json
import re
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

llm = LLM(model=sys.argv[1], max_model_len=256)


def generate(prompt, max_tokens=60, **constraint):
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**constraint), seed=0)
    return llm.generate(prompts=prompt, sampling_params=params, use_tqdm=False)[0].outputs[0].text


assert generate("vLLM is wonderful!", choice=["Positive", "Negative"]) in ("Positive", "Negative")
email = generate("An email address:", regex=r"\w{1,8}@\w{1,8}\.com")
assert re.fullmatch(r"\w{1,8}@\w{1,8}\.com", email), email
schema = {
    "type": "object",
    "properties": {"brand": {"enum": ["A", "B"]}, "year": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["brand", "year"],
    "additionalProperties": False,
}
car = json.loads(generate("A car as JSON:", json=schema, disable_any_whitespace=True))
assert car["brand"] in ("A", "B") and 1 <= car["year"] <= 99
query = generate("A query:", grammar='root ::= "SELECT " ("a" | "b") " FROM t"')
assert query in ("SELECT a FROM t", "SELECT b FROM t"), query

old_style = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"]), max_tokens=8)
assert llm.generate("?", old_style)[0].outputs[0].text in ("yes", "no")

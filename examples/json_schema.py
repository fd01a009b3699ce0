"""Text that a JSON schema describes, whatever the model would rather say."""

import json

from nanovllm import LLM, RequestError, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}

with LLM() as llm:
    params = SamplingParams(
        temperature=0, max_tokens=100,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    )  # fmt: skip
    question = [{"role": "user", "content": "what is the capital of France?"}]
    try:
        text = llm.chat(question, params, use_tqdm=False)[0]["text"]
    except RequestError as error:  # llguidance is an extra
        raise SystemExit(str(error)) from None
    print(json.loads(text))

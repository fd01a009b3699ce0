# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm", "llguidance>=1.9,<2"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""Text that a JSON schema describes, whatever the model would rather say.

The schema gives the form, the model the content. The demo model knows capitals and sums, but has never seen JSON:
asked for an object, it fills in anything.
"""

import json

from nanovllm import LLM, RequestError, SamplingParams, StructuredOutputsParams

CITY = {"enum": ["Paris", "Rome", "Oslo"]}
OBJECT = {
    "type": "object",
    "properties": {"city": CITY, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
QUESTIONS = {"17 + 25": {"type": "integer"}, "what is the capital of France?": CITY, "tell me of a city": OBJECT}

with LLM() as llm:
    for question, schema in QUESTIONS.items():
        params = SamplingParams(
            temperature=0, max_tokens=100,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )  # fmt: skip
        try:
            text = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)[0]["text"]
        except RequestError as error:  # llguidance is an extra
            raise SystemExit(str(error)) from None
        print(f"{question}  ->  {json.loads(text)!r}")

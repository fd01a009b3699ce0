# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""Several completions of one prompt, and the one that the model itself finds most probable per token."""

from nanovllm import LLM, SamplingParams

with LLM() as llm:
    # the prompt is computed once; logprobs=0 reports those of the generated tokens alone
    params = SamplingParams(n=8, temperature=2, max_tokens=40, logprobs=0, seed=1)
    (output,) = llm.chat([{"role": "user", "content": "how do you spell cat?"}], params, use_tqdm=False)
    ranked = sorted(output.outputs, key=lambda one: one.cumulative_logprob / len(one.token_ids), reverse=True)
    for one in ranked:
        print(f"{one.cumulative_logprob / len(one.token_ids):8.3f} per token  {one.text!r}")
    print(f"best: {ranked[0].text}")

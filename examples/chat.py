# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""A conversation: each answer sees what was said before."""

from nanovllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=60)
with LLM() as llm:  # the bundled demo model; LLM("Qwen/Qwen3-0.6B") for a real one
    messages = []
    for question in ("introduce yourself", "what is the capital of France?", "2 + 3"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, params, use_tqdm=False)[0]["text"]
        messages.append({"role": "assistant", "content": answer})
        print(f"user:      {question}\nassistant: {answer}")

# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""How probable given answers are: multiple choice without generating anything."""

from nanovllm import LLM

QUESTION, CHOICES = "what is the capital of France?", ["Paris", "Rome", "Oslo"]

with LLM() as llm:
    tokenizer = llm.get_tokenizer()
    asked = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    token_ids = [tokenizer.encode(prompt + choice, add_special_tokens=False) for choice in CHOICES]
    # what stands before start is computed once, where the choices share whole KV blocks
    scores = llm.score(token_ids, start=start, use_tqdm=False)
    for choice, score in zip(CHOICES, scores, strict=True):
        print(f"{score.total:8.3f}  {choice}  greedy: {all(score.is_argmax)}")
    print(f"answer: {max(zip(scores, CHOICES, strict=True), key=lambda x: x[0].total)[1]}")

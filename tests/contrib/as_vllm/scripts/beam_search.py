"""Beam search: the best sequences with the prompt's tokens, best first."""

import sys

from vllm import LLM, TextPrompt, TokensPrompt
from vllm.sampling_params import BeamSearchParams

llm = LLM(model=sys.argv[1])
params = BeamSearchParams(beam_width=4, max_tokens=10)
prompt = "<|im_start|>user\nWhat is 37 + 45?<|im_end|>\n<|im_start|>assistant\n"
tokens = llm.get_tokenizer().encode(prompt)
outputs = llm.beam_search([TextPrompt(prompt=prompt), TokensPrompt(prompt_token_ids=tokens)], params)
assert len(outputs) == 2
for output in outputs:
    assert len(output.sequences) == 4
    scores = [sequence.cum_logprob / len(sequence.tokens) for sequence in output.sequences]
    assert all(isinstance(sequence.text, str) for sequence in output.sequences)
    assert "82" in output.sequences[0].text
    assert list(output.sequences[0].tokens[: len(tokens)]) == tokens
assert outputs[0].sequences[0].tokens == outputs[1].sequences[0].tokens

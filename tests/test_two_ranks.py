"""What a request can ask gives the same on two ranks as on one."""

from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL


def everything(tensor_parallel_size):
    params = [
        SamplingParams(n=3, seed=1, max_tokens=12),
        SamplingParams(temperature=0, stop=["11"], max_tokens=40),
        SamplingParams(temperature=0, prompt_logprobs=1, repetition_penalty=1.2, max_tokens=12),
        SamplingParams(temperature=0, allowed_token_ids=[20, 21, 22], max_tokens=5),
    ]
    prompts = ["count to 5", "list all prime numbers within 100", "2 + 3", "spell cat"]
    with LLM(str(DEMO_MODEL), device="cpu", tensor_parallel_size=tensor_parallel_size, quiet=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        deltas = list(llm.stream(prompts[1], params[1]))
        ids = [output.prompt_token_ids for output in outputs[:2]]
        scores = llm.score([[*prompt, 5, 6] for prompt in ids], start=2)
    completions = [[(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]
    streamed = "".join(delta["text"] for delta in deltas), [i for delta in deltas for i in delta["token_ids"]]
    ranks = [[p.rank for p in at.values()] for at in outputs[2].prompt_logprobs[1:]]
    return completions, streamed, ranks, [[round(x, 3) for x in score.logprobs] for score in scores]


def test_two_ranks():
    one, two = everything(1), everything(2)
    assert one[:3] == two[:3]
    assert all(abs(a - b) < 0.01 for x, y in zip(one[3], two[3], strict=True) for a, b in zip(x, y, strict=True))
    (_, stopped, *_), streamed = one[0], one[1]
    assert stopped[0][2:] == ("stop", "11") and streamed == (stopped[0][0], stopped[0][1])

"""What a request can ask gives the same on two ranks as on one."""

from enum import Enum

from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL


def test_two_ranks_in_bfloat16():
    """Sums over the ranks are rounded, too: the answers of the demo model have a margin for that."""
    chat = [{"role": "user", "content": "list all prime numbers within 100"}]
    with LLM(str(DEMO_MODEL), device="cpu", dtype="bfloat16", tensor_parallel_size=2, quiet=True) as llm:
        (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    assert output["text"] == ", ".join(str(n) for n in range(2, 100) if all(n % d for d in range(2, n)))


class Text(str, Enum):
    """No other process finds this class: a worker has another main module, and does not know this one."""

    STOP = "11"


def test_texts_of_a_class_of_the_user(monkeypatch):
    """Stop strings and grammars of such a class went to the worker, which could not unpickle them and died."""
    monkeypatch.setattr(Text, "__module__", "__main__")
    params = SamplingParams(temperature=0, stop=[Text.STOP], bad_words=[Text.STOP.value * 3], max_tokens=40)
    with LLM(str(DEMO_MODEL), device="cpu", tensor_parallel_size=2, quiet=True) as llm:
        (output,) = llm.generate(["list all prime numbers within 100"], params, use_tqdm=False)
    assert output.outputs[0].stop_reason == "11"


def test_only_constrained_requests_need_a_second_message(monkeypatch):
    """The other rank samples by itself, unless what a request of the batch may sample depends on the tokens before."""
    bad_words = SamplingParams(temperature=0, bad_words="e", ignore_eos=True, max_tokens=4)
    plain = SamplingParams(temperature=0, ignore_eos=True, max_tokens=9)
    masked = SamplingParams(temperature=0, allowed_token_ids=[20, 21, 22], logprobs=1, max_tokens=5)
    with LLM(str(DEMO_MODEL), device="cpu", tensor_parallel_size=2, quiet=True, max_num_batched_tokens=32,
             max_num_seqs=8) as llm:  # fmt: skip
        methods, send = [], llm.model_runner.workers.send

        def record(*message):
            methods.extend(message[:1])
            send(*message)

        monkeypatch.setattr(llm.model_runner.workers, "send", record)
        for params, num_second in (([plain, masked], 0), ([plain, bad_words], 4), ([plain] * 2, 0)):
            methods.clear()
            llm.generate(["one", "two"], params, use_tqdm=False)
            assert methods == ["run_model", "run_sampler"] * num_second + ["run_model"] * (9 - num_second)
        methods.clear()
        llm.generate("many words " * 20, bad_words, use_tqdm=False)  # chunks that sample nothing, then one that does
        assert methods[:2] == ["run_model"] * 2 and methods[-8:] == ["run_model", "run_sampler"] * 4

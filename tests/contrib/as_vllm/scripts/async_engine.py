"""A server's use of the engine: many tasks on one loop, streams, aborted and cancelled requests."""

import asyncio
import sys
from itertools import pairwise

from transformers import AutoTokenizer
from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.utils import random_uuid

args = AsyncEngineArgs(model=sys.argv[1], max_num_seqs=4, enable_log_requests=False, disable_log_stats=True)
engine = AsyncLLMEngine.from_engine_args(args, usage_context=UsageContext.API_SERVER)
long = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)


async def complete(prompt, params):
    texts, output = [], None
    async for output in engine.generate(prompt, params, random_uuid()):
        texts.append(output.outputs[0].text)
    assert output.finished
    return texts, output


async def refused(error, said, generator):
    try:
        async for _ in generator:
            pass
    except error as e:
        assert said in str(e), e
    else:
        raise AssertionError(f"no {error.__name__}")


async def idle():
    for _ in range(500):
        if engine.get_num_unfinished_requests() == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are left")


async def main():
    def text(i):
        return f"<|im_start|>user\n{i} + 3<|im_end|>\n<|im_start|>assistant\n"

    greedy = SamplingParams(temperature=0, max_tokens=20)
    delta = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    final = SamplingParams(n=2, temperature=0.9, seed=3, max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)
    *sums, (parts, _), (finals, both) = await asyncio.gather(
        *(complete(text(i), greedy) for i in range(7)), complete("count to 30", delta),
        complete({"prompt_token_ids": [5, 6, 7]}, final),
    )  # fmt: skip
    assert [output.outputs[0].text for _, output in sums] == [str(i + 3) for i in range(7)]
    assert len(finals) == 1 and [completion.index for completion in both.outputs] == [0, 1]
    whole = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts, output = await complete("count to 30", whole)
    assert len(parts) > 5 and "".join(parts) == output.outputs[0].text == texts[-1]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))

    # a task that is cancelled, a generator that is left, and one that another task aborts
    task = asyncio.create_task(complete("count to 100", long))
    await asyncio.sleep(0.2)
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    generator = engine.generate("count to 100", long, "left")
    await anext(generator)
    await generator.aclose()
    await idle()
    seen = []
    async for output in engine.generate("count to 100", long, "aborted"):
        seen.append(len(output.outputs[0].token_ids))
        if len(seen) == 3:
            await engine.abort("aborted")
    assert 3 <= len(seen) < 100 and not output.finished
    await engine.abort(["aborted", "no such request"])
    await idle()

    # a task that is late gets the newest output
    late = engine.generate("count to 100", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), "late")
    await anext(late)
    await idle()
    assert (await anext(late)).finished

    # one task's errors are its own
    running = engine.generate("count to 100", long, "twice")
    await anext(running)
    await refused(ValueError, "request_id='twice' is in use", engine.generate("x", greedy, "twice"))
    await refused(ValueError, "the prompt has 5000 tokens", engine.generate([5] * 5000, greedy, "long"))
    await refused(ValueError, "generate: priority=3 is not supported", engine.generate("x", greedy, "p", priority=3))
    assert not (await anext(running)).finished
    await running.aclose()

    tokenizer = engine.get_tokenizer()  # of vLLM 0.33; a coroutine in versions before, as get_model_config was
    assert isinstance(tokenizer, type(AutoTokenizer.from_pretrained(sys.argv[1])))
    assert tokenizer.decode([5]) == (await engine.get_tokenizer()).decode([5])
    assert engine.model_config.max_model_len == (await engine.get_model_config()).max_model_len == 4096
    embed = [engine.encode(text(i), PoolingParams(task="embed"), f"embed {i}") for i in range(2)]
    vectors = [await anext(each) for each in embed]
    assert [vector.request_id for vector in vectors] == ["embed 0", "embed 1"] and vectors[0].outputs.data.norm() > 0
    await engine.check_health()
    assert await engine.reset_prefix_cache()
    await idle()
    await engine.sleep(level=1)
    assert await engine.is_sleeping()
    await refused(RuntimeError, "the engine sleeps", engine.generate("x", greedy, "asleep"))
    await engine.wake_up()
    assert (await complete(text(4), greedy))[1].outputs[0].text == "7"
    try:
        engine.no_such_method()
    except AttributeError as error:
        assert "stand-in for vLLM's AsyncLLM has no 'no_such_method'" in str(error)

    waiting = asyncio.create_task(complete("count to 100", long))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(engine.shutdown)
    (error,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(error, RuntimeError) and "the engine was shut down" in str(error), error
    assert not engine.is_running


asyncio.run(main())

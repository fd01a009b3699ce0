"""``LLM.sleep`` and ``wake_up``: memory is freed, tokens stay the same, and a sleeping engine refuses. 30 s."""

import gc

import pytest
import torch
from helpers import DEVICES, EagerGraphs, generate, greedy, prompt_of, run_ahead, use_graphs_on_cpu
from leaks import check_is_empty
from test_update_weights import ENTRIES, PROMPTS

from nanovllm import ConfigError, EngineError, OutOfMemoryError, SamplingParams
from nanovllm.runner import memory, model_runner
from nanovllm.runner.weights import free_cached_memory

STEPS = [  # plain; what needs the sampling tables; a short prompt that is padded and replayed with graphs
    greedy(6),
    greedy(6, repetition_penalty=1.3, logit_bias={7: 1.0}),
    SamplingParams(temperature=1, seed=3, max_tokens=6, allowed_token_ids=[3, 5, 9], ignore_eos=True),
]


def tokens(llm):
    return generate(llm, PROMPTS, STEPS)


def storages(model):
    return [t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_before_and_after(device, level, tied, make_llm, make_checkpoint):
    """All at once, or the weights first; twice in a row."""
    path = make_checkpoint(tie_word_embeddings=tied)
    llm = make_llm(model=path, device=device, dtype="float32")
    runner = llm.model_runner
    before, sizes = tokens(llm), storages(runner.model)
    features = runner.sampler.features
    assert features.masks.table is not None and features.penalties.table is not None
    for tags in (None, ["kv_cache"], ["weights"]):
        assert llm.is_sleeping() is False
        llm.sleep(level)
        assert llm.is_sleeping() is True
        assert runner.kv_cache is None and runner.graphs is None
        assert all(layer.self_attn.attn.k_cache.numel() == 0 for layer in runner.model.model.layers)
        assert features.masks.table is features.penalties.table is None
        if device == "cuda":
            assert not any(storages(runner.model))
        elif level == 2:  # but the buffers, which are in no checkpoint
            assert not any(param.untyped_storage().nbytes() for param in runner.model.parameters())
        llm.wake_up(tags)
        assert llm.is_sleeping() is (tags is not None)
        if level == 2 and tags != ["kv_cache"]:
            llm.update_weights(path)
        llm.wake_up()
        if level == 2 and tags == ["kv_cache"]:
            llm.update_weights(path)
        assert storages(runner.model) == sizes
        assert tokens(llm) == before
        check_is_empty(llm)


def test_graphs_are_captured_again(make_llm, monkeypatch):
    """When both are back, since they read both."""
    llm = run_ahead(use_graphs_on_cpu(make_llm()))
    runner, before = llm.model_runner, tokens(llm)
    monkeypatch.setattr(model_runner, "CUDAGraphs", EagerGraphs)
    monkeypatch.setattr(type(runner.rank), "use_graphs", True)
    first = runner.graphs
    *_, prefill_graphs, _ = runner.launchers
    prefill_graphs.buffer.zero_()  # a capture runs nothing; its stand-in runs on what is there
    llm.sleep()
    llm.wake_up(["kv_cache"])
    assert runner.graphs is None
    llm.wake_up(["weights"])
    assert runner.graphs is not None and runner.graphs.sizes == first.sizes
    assert tokens(llm) == before
    second = runner.graphs
    llm.wake_up()
    assert runner.graphs is second


@pytest.mark.parametrize("level", [1, 2])
def test_two_ranks(level, make_llm, make_checkpoint):
    llm = make_llm(tensor_parallel_size=2)
    before = tokens(llm)
    llm.sleep(level)
    with pytest.raises(EngineError, match=r"the engine sleeps \(kv_cache, weights\)"):
        tokens(llm)
    llm.wake_up(["weights"])
    if level == 2:
        llm.update_weights(make_checkpoint())
    llm.wake_up(["kv_cache"])
    assert tokens(llm) == before


def test_a_sleeping_engine_refuses(make_llm, make_checkpoint):
    """Every way in; and nothing is queued."""
    llm = make_llm()
    before = tokens(llm)

    def check(*texts):
        for run in ENTRIES.values():
            with pytest.raises(EngineError) as error:
                run(llm)
            assert all(text in str(error.value) for text in texts)
            check_is_empty(llm)

    llm.sleep()
    check("the engine sleeps (kv_cache, weights); call wake_up() first.")
    with pytest.raises(EngineError) as error:
        llm.update_weights(make_checkpoint())
    assert str(error.value) == "the weights sleep; call wake_up(tags=['weights']) before they are updated."
    llm.wake_up(["weights"])
    check("the engine sleeps (kv_cache); call wake_up() first.")
    llm.sleep(2)  # drops what level 1 has kept
    llm.wake_up(["weights", "kv_cache"])
    check("the weights were dropped by sleep(level=2): 25 tensors are missing", "update_weights with all of them")
    name, param = next(iter(llm.model_runner.model.named_parameters()))
    llm.update_weights({name: param.clone()}, partial=True)
    check("the weights were dropped by sleep(level=2): 24 tensors are missing")  # not "an update failed"
    llm.update_weights(make_checkpoint())
    assert tokens(llm) == before
    assert not llm.step()[0]


def test_a_feed_that_puts_the_engine_to_sleep(make_llm):
    """The last moment: its own request is refused."""
    llm = make_llm()

    def feed():
        llm.sleep()
        yield prompt_of(5), greedy(1)

    with pytest.raises(EngineError, match="the engine sleeps"):
        list(llm.stream(feed()))
    llm.wake_up()
    check_is_empty(llm)
    tokens(llm)


def test_levels_and_tags(make_llm):
    llm = make_llm()
    for level in (0, 3, "1", None):
        with pytest.raises(ConfigError) as error:
            llm.sleep(level)
        assert str(error.value) == f"sleep: level={level!r} must be 1 (weights to the host) or 2 (weights dropped)."
        assert not llm.is_sleeping()
    llm.sleep()
    for tags in ("weights", ["weight"], [["weights"]], 1):
        with pytest.raises(ConfigError) as error:
            llm.wake_up(tags)
        assert str(error.value) == f"wake_up: tags={tags!r} must be None or a list of 'weights', 'kv_cache'."
    llm.wake_up()
    llm.wake_up()  # awake already
    tokens(llm)


@pytest.mark.parametrize("device", DEVICES)
def test_no_room_to_wake_up(device, make_llm, monkeypatch):
    """A trainer has taken the memory: it sleeps on, and wakes up when there is room."""
    llm = make_llm(device=device)
    before = tokens(llm)
    llm.sleep()
    for error in (torch.OutOfMemoryError("not now"), MemoryError("not now")):
        with monkeypatch.context() as patch:
            patch.setattr(memory, "allocate_kv_cache", lambda *_, error=error: throw(error))
            with pytest.raises(OutOfMemoryError, match=r"wake_up: no room on .* for kv_cache, weights: not now\nFree"):
                llm.wake_up()
        assert llm.is_sleeping() and llm.model_runner.kv_cache is None
        if device == "cuda":
            assert not any(storages(llm.model_runner.model))
    llm.wake_up()
    assert tokens(llm) == before


def throw(error):
    raise error


def test_the_hosts_memory_is_freed(make_llm, make_checkpoint):
    """On the CPU: level 2 drops the weights."""
    try:
        with open("/proc/self/statm") as file:
            file.read()
    except OSError:
        pytest.skip("needs /proc")

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    path = make_checkpoint(hidden_size=512, intermediate_size=8192)
    generate(make_llm(), PROMPTS[:1], greedy(1))  # the process's pools of threads and of memory are there
    llm = make_llm(model=path)
    size = sum(param.nbytes for param in llm.model_runner.model.parameters())
    assert size > 80 << 20
    free_cached_memory(torch.device("cpu"))  # what other tests left, so that only the weights are counted
    for param in llm.model_runner.model.parameters():
        param.data.zero_()  # each of its pages is resident
    before = resident()
    llm.sleep(2)
    assert before - resident() > 0.5 * size  # malloc may keep some


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.parametrize("level", [1, 2])
def test_the_devices_memory_is_freed(level, make_llm, make_checkpoint):
    """Weights, KV cache and the graphs' memory; and in ten rounds none of it is lost."""
    path = make_checkpoint(hidden_size=512, intermediate_size=4096)
    torch.cuda.empty_cache()
    free_at_first = torch.cuda.mem_get_info()[0]
    llm = make_llm(model=path, device="cuda", num_kvcache_blocks=80_000)
    before = tokens(llm)
    size = sum(param.nbytes for param in llm.model_runner.model.parameters()) + llm.model_runner.kv_cache.nbytes
    assert size > 1 << 30
    awake, asleep = [], []
    for _ in range(10):
        awake.append(torch.cuda.mem_get_info()[0])
        llm.sleep(level)
        asleep.append(torch.cuda.mem_get_info()[0])
        llm.wake_up()
        if level == 2:
            llm.update_weights(path)
        assert tokens(llm) == before
    assert asleep[0] - awake[0] > 0.98 * size
    assert free_at_first - asleep[0] < 400 << 20  # modules of kernels and library handles: 300 MiB on an H200
    assert asleep[0] - asleep[-1] < 8 << 20 and awake[1] - awake[-1] < 8 << 20

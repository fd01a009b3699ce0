"""``LLM.update_weights``: tokens of the new weights, as transformers computes them; refusals leave a usable engine, or
one that says what it needs. 25 s."""

import os
import signal
import time

import pytest
import torch
from helpers import DEVICES, Reference, generate, greedy, prompt_of, run_ahead, use_graphs_on_cpu
from leaks import check_is_empty, finish

from nanovllm import CheckpointError, EngineError, WorkerError
from nanovllm.runner import weights as weights_module

PROMPTS = [prompt_of(40), prompt_of(9, seed=1), prompt_of(17, seed=2)]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def trained(request, make_checkpoint, tmp_path_factory):
    """(path of a checkpoint, transformers with other weights of that shape, their path)."""
    path = make_checkpoint(tie_word_embeddings=request.param)
    reference = Reference(path)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for param in reference.model.parameters():
            param.mul_(1 + 0.3 * torch.randn_like(param))
    new_path = tmp_path_factory.mktemp("trained")
    reference.model.save_pretrained(new_path, max_shard_size="150KB")
    assert len(list(new_path.glob("*.safetensors"))) > 2
    return path, reference, str(new_path)


def tokens(llm):
    return generate(llm, PROMPTS, greedy(8))


def expected(reference):
    return [reference.greedy(prompt, 8) for prompt in PROMPTS]


FORMS = {
    "named_parameters": lambda model, path: model.named_parameters(),
    "state_dict": lambda model, path: model.state_dict(),
    "pairs in any order and layout": lambda model, path: [
        (name, param.data.t().contiguous().t() if param.dim() == 2 else param.data)
        for name, param in reversed(list(model.named_parameters()))
    ],
    "float64": lambda model, path: ((name, param.data.double()) for name, param in model.named_parameters()),
    "directory": lambda model, path: path,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_new_weights_count(form, trained, make_llm):
    """In place, and keys and values of the old ones are not found any more."""
    path, reference, new_path = trained
    llm = make_llm(model=path)
    before = tokens(llm)
    assert generate(llm, PROMPTS[:1], greedy(1)) and llm.generate(PROMPTS[:1], greedy(1))[0].num_cached_tokens == 32
    addresses = [param.data_ptr() for param in llm.model_runner.model.parameters()]
    names = llm.update_weights(FORMS[form](reference.model, new_path))
    assert names == {name for name, _ in reference.model.named_parameters()}
    assert [param.data_ptr() for param in llm.model_runner.model.parameters()] == addresses
    (output,) = llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert tokens(llm) == expected(reference) != before
    llm.update_weights(path)
    assert tokens(llm) == before
    check_is_empty(llm)


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_stay_valid(device, trained, make_llm):
    path, reference, _ = trained
    llm = make_llm(model=path, device=device, dtype="float32")
    if device == "cpu":
        run_ahead(use_graphs_on_cpu(llm))
    graphs = llm.model_runner.graphs
    assert graphs is not None
    tokens(llm)
    llm.update_weights(reference.model.named_parameters())
    assert llm.model_runner.graphs is graphs
    assert tokens(llm) == expected(reference)


@pytest.mark.parametrize("form", ["named_parameters", "directory"])
def test_two_ranks(form, trained, make_llm, monkeypatch):
    """Pairs cross in several files of memory that have no name: a process that was killed here left one of 512 MiB."""
    monkeypatch.setattr(weights_module, "BUCKET_BYTES", 200_000)
    path, reference, new_path = trained
    files, loads, load = [], [], weights_module.Weights.load

    def names():
        there = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
        return {name for name in there if name.startswith("nanovllm-")}

    def watched(self, weights):
        files.append(names())
        loads.append(weights)
        load(self, weights)

    monkeypatch.setattr(weights_module.Weights, "load", watched)
    llm = make_llm(model=path, tensor_parallel_size=2)
    before, known = tokens(llm), names()
    llm.update_weights(FORMS[form](reference.model, new_path))
    assert tokens(llm) == expected(reference) != before
    assert len(loads) == 1 if form == "directory" else len(loads) > 2
    assert all(during <= known for during in files)
    unknown = "model.nothing", torch.zeros(1)
    for wrong, written in ([unknown], False), ([(NORM, torch.ones(64)), unknown], True):
        with pytest.raises(CheckpointError, match=r"update_weights: tensor '.*' is twice there, or unknown"):
            llm.update_weights(wrong, partial=True)
        if written:
            with pytest.raises(EngineError, match="failed half way"):
                tokens(llm)
    with pytest.raises(CheckpointError, match=f"tensor '{NORM}' is twice there"):
        llm.update_weights([(NORM, torch.ones(64))] * 2, partial=True)
    llm.update_weights(FORMS[form](reference.model, new_path))
    assert tokens(llm) == expected(reference)
    assert names() <= known


def test_two_ranks_and_a_trainer_that_fails(trained, make_llm):
    """Between buckets the ranks agree, so the engine lives on; a rank that dies ends it."""
    path, reference, new_path = trained
    llm = make_llm(model=path, tensor_parallel_size=2)

    def interrupted():
        yield NORM, torch.ones(64)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(interrupted(), partial=True)
    llm.update_weights(new_path)
    assert tokens(llm) == expected(reference)
    os.kill(llm.model_runner.workers.processes[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 failed"):
        llm.update_weights(new_path)
    assert time.monotonic() - begin < 10
    with pytest.raises(EngineError, match="this engine is shut down"):
        llm.update_weights(new_path)


def test_partial(make_llm, make_checkpoint, tiny):
    llm = make_llm()
    before = {name: param.clone() for name, param in llm.model_runner.model.named_parameters()}
    new = torch.randn(64)
    assert llm.update_weights([(NORM, new)], partial=True) == {NORM}
    for name, param in llm.model_runner.model.named_parameters():
        assert torch.equal(param, new if name == NORM else before[name]), name
    assert llm.update_weights([], partial=True) == set()
    tokens(llm)
    q = "model.layers.0.self_attn.q_proj.weight"
    llm.update_weights({q: torch.zeros(128, 64)}, partial=True)
    qkv = llm.model_runner.model.model.layers[0].self_attn.qkv_proj.weight
    assert not qkv[:128].any() and torch.equal(qkv[128:], before["model.layers.0.self_attn.qkv_proj.weight"][128:])


ENTRIES = {
    "generate": lambda llm: llm.generate(PROMPTS, greedy(2), use_tqdm=False),
    "add_request": lambda llm: llm.add_request(PROMPTS[0], greedy(2)),
    "stream": lambda llm: list(llm.stream(PROMPTS[0], greedy(2))),
    "stream of many": lambda llm: list(llm.stream(iter(PROMPTS), greedy(2))),
    "score": lambda llm: llm.score(PROMPTS),
}


def test_after_half_an_update_nothing_runs_until_a_whole_one(trained, make_llm):
    path, reference, _ = trained
    llm = make_llm(model=path)
    pairs = list(reference.model.named_parameters())
    with pytest.raises(CheckpointError) as error:
        llm.update_weights(pairs[2:])
    missing = ", ".join(sorted(name for name, _ in pairs[:2]))
    assert str(error.value) == (
        f"update_weights: 2 tensors are missing, among them {missing}; give all of them, or partial=True."
    )
    for run in ENTRIES.values():
        with pytest.raises(EngineError) as error:
            run(llm)
        assert str(error.value).startswith(f"an update of the weights failed half way: {len(pairs)} tensors are missi")
        assert str(error.value).endswith("Call update_weights with all of them first.")
        check_is_empty(llm)
    llm.update_weights(pairs[:5], partial=True)  # in parts
    with pytest.raises(EngineError, match=f"half way: {len(pairs) - 5} tensors are missing"):
        tokens(llm)
    llm.update_weights(iter(pairs[5:]), partial=True)
    assert tokens(llm) == expected(reference)


def raises_after(pairs, n):
    yield from pairs[:n]
    raise ZeroDivisionError("the trainer's")


WRONG = {  # edit of the list of pairs -> error
    "unknown": (lambda pairs: [("model.nothing", torch.ones(1)), *pairs], "tensor 'model.nothing' is twice there, or"),
    "shape": (lambda pairs: [(NORM, torch.ones(65)), *pairs], r"layernorm.weight' has shape \[65\], expected \[64\]"),
    "integers": (lambda pairs: [(NORM, torch.ones(64).int()), *pairs], "weight' is of int32, expected floats"),
    "names": (lambda pairs: [name for name, _ in pairs], r"pairs \(name, tensor\) such as .*, not model\."),
    "None": (lambda pairs: None, r"pairs \(name, tensor\) such as .*, not None"),
    "numpy": (lambda pairs: [(NORM, torch.ones(64).numpy())], r"takes a path of safetensors, or pairs"),
    "no name": (lambda pairs: [(0, torch.ones(64))], r"takes a path of safetensors, or pairs"),
    "no such path": (lambda pairs: "no/such/path", "no/such/path does not exist; give a directory of safetensors"),
    "no safetensors": (lambda pairs: os.path.dirname(__file__), r"tests holds no \*\.safetensors file"),
    "raises": (lambda pairs: raises_after(pairs, 0), "the trainer's"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_before_anything_is_written(case, trained, make_llm):
    """The engine runs on with the weights it has."""
    path, reference, _ = trained
    llm = make_llm(model=path)
    before = tokens(llm)
    edit, message = WRONG[case]
    with pytest.raises((CheckpointError, ZeroDivisionError), match=message):
        llm.update_weights(edit(list(reference.model.named_parameters())))
    assert tokens(llm) == before


@pytest.mark.parametrize("edit", [lambda pairs: [*pairs, pairs[3]], lambda pairs: raises_after(pairs, 7)])
def test_what_is_noticed_when_some_are_written(edit, trained, make_llm):
    path, reference, _ = trained
    llm = make_llm(model=path)
    with pytest.raises((CheckpointError, ZeroDivisionError)):
        llm.update_weights(edit(list(reference.model.named_parameters())))
    with pytest.raises(EngineError, match="failed half way"):
        tokens(llm)
    llm.update_weights(reference.model.named_parameters())
    assert tokens(llm) == expected(reference)


def test_needs_an_idle_engine(make_llm, tiny, reference):
    llm = run_ahead(make_llm())
    stream = llm.stream(iter(PROMPTS), greedy(8))
    next(stream)
    number = llm.add_request(PROMPTS[0], greedy(8))
    for change in (lambda: llm.update_weights({}), llm.sleep, llm.wake_up):
        with pytest.raises(EngineError, match=r"(update_weights|sleep|wake_up) needs an idle engine; finish or abort"):
            change()
    list(stream)
    with pytest.raises(EngineError, match="needs an idle engine"):
        llm.update_weights(tiny.model.named_parameters())
    finished = finish(llm)
    assert finished[number] == reference(PROMPTS[0], 8)
    llm.update_weights(tiny.model.named_parameters())
    assert tokens(llm) == [reference(prompt, 8) for prompt in PROMPTS]


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_ten_updates_leak_nothing(make_llm, trained):
    path, reference, new_path = trained
    llm = make_llm(model=path, device="cuda", dtype="float32")
    free, used = set(), set()
    for i in range(12):
        llm.update_weights(new_path if i % 2 else reference.model.state_dict())
        assert tokens(llm) == expected(reference)
        if i < 2:  # one of each form: library handles, kernels' modules and buffers for the first time
            continue
        used.add(torch.cuda.memory_allocated())
        free.add(torch.cuda.mem_get_info()[0])
    assert len(used) == 1 and max(free) - min(free) <= 4 << 20

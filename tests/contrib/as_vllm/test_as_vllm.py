"""Scripts written for vLLM, one for each kind of use, run unmodified.

They are in ``scripts/``, know vLLM's names only, and check what they get. Each takes a model's path.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_python

from nanovllm.contrib.as_vllm import options
from nanovllm.contrib.as_vllm.async_llm import AsyncLLM
from nanovllm.contrib.as_vllm.helpers import LoRARequest
from nanovllm.contrib.as_vllm.llm import LLM
from nanovllm.contrib.as_vllm.sampling import SamplingParams
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.utils.checkpoint import DEMO_MODEL

FOLDER = Path(__file__).with_name("scripts")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


def run(*argv, path="", **more):
    return run_python("-W", "error", *argv, PYTHONPATH=f"{ROOT}{os.pathsep}{path}", **more)


@pytest.fixture(scope="module")
def done():
    """Script -> what it did."""
    run_all = run(ROOT / "tests" / "run_scripts.py", "--as-vllm", FOLDER, *SCRIPTS, timeout=480)
    return json.loads(run_all.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_runs(done, script):
    assert not done[script]["error"], done[script]["error"]


WRITTEN_FOR_VLLM = """
import importlib.metadata, importlib.util, multiprocessing, pickle, subprocess, sys
import vllm
from vllm import LLM, EngineArgs, SamplingParams
assert "torch" not in sys.modules  # harnesses import it whether they use it or not
from vllm.entrypoints.llm import LLM as same

def say():
    print(LLM.__module__, flush=True)

if __name__ == "__main__":
    assert same is LLM and importlib.util.find_spec("vllm") is not None
    assert vllm.__version__ == importlib.metadata.version("vllm")
    assert pickle.loads(pickle.dumps(SamplingParams(n=2))) == SamplingParams(2)
    subprocess.run([sys.executable, "-c", "import vllm; print(vllm.LLM.__module__)"], check=True)
    process = multiprocessing.get_context("spawn").Process(target=say)
    process.start()
    process.join()
    print("ran as", __name__, "with", sys.argv[1:])
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_an_installed_vllm_is_not_imported(tmp_path, as_module):
    """Nor in a child process; and the script sees itself as the main program, with its own arguments."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "vllm.py").write_text("raise SystemExit('the installed vLLM was imported')")
    (tmp_path / "script.py").write_text(WRITTEN_FOR_VLLM)
    target = ["-m", "script"] if as_module else ["script.py"]
    argv = ["-m", "nanovllm.as_vllm", *target, "--flag", "x"]
    done = run(*argv, cwd=tmp_path, path=tmp_path / "installed")
    lines = done.stdout.splitlines()
    assert lines == [*["nanovllm.contrib.as_vllm.llm"] * 2, "ran as __main__ with ['--flag', 'x']"]


def test_a_checkout_that_is_not_installed_serves_chats(tmp_path):
    """The script's directory takes the place of the checkout in sys.path, which the process of templates gets."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, vllm\nllm = vllm.LLM(sys.argv[1])\n"
        "print(llm.chat([{'role': 'user', 'content': '2 + 3'}], vllm.SamplingParams(temperature=0))[0].outputs[0].text)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    argv = [sys.executable, "-m", "nanovllm.as_vllm", script, DEMO_MODEL]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "5\n", done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [([], "usage: python -m nanovllm.as_vllm script.py"), (["none.py"], "there is no script 'none.py'")],
)
def test_bad_command_lines(argv, said):
    done = run("-m", "nanovllm.as_vllm", *argv, check=False)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_help_is_no_error():
    done = run("-m", "nanovllm.as_vllm", "--help")
    assert done.stdout.strip().startswith("Run a script written for vLLM") and "[args]" in done.stdout


def test_an_engine_without_references_frees_its_memory():
    """Scripts free it by ``del llm``, and make the next one."""
    llm = LLM(str(DEMO_MODEL), device="cpu")
    llm.apply_model(lambda model: model.load_weights([]))
    core = weakref.ref(llm.llm_engine.awake())
    gc.disable()
    try:
        del llm
        assert core() is None
    finally:
        gc.enable()


def test_the_loop_ends_after_a_failed_step(monkeypatch):
    """A script that goes on after the error would step an engine for ever that has dropped its requests."""
    llm = LLM(str(DEMO_MODEL), device="cpu")
    monkeypatch.setattr(llm.awake().scheduler, "schedule", lambda: 1 // 0)
    for run in (llm.step, llm.wait_for_completion):
        llm.add_request("name", "2 + 3", SamplingParams())
        with pytest.raises(ZeroDivisionError):
            run()
        assert not llm.has_unfinished_requests()
    llm.shutdown()


def test_a_failed_step_ends_the_tasks_that_wait_for_it(monkeypatch):
    """Those of another adapter go on; then the engine serves again."""
    engine = AsyncLLM(str(DEMO_MODEL), device="cpu", enable_lora=True)
    params, missing = SamplingParams(temperature=0, max_tokens=9), LoRARequest("missing", 9, "/nowhere")

    async def last(name, lora=None):
        return [output async for output in engine.generate("2 + 3", params, name, lora)][-1]

    async def main():
        names = ("a", None), ("b", missing), ("c", None)
        first, refused, second = await asyncio.gather(*map(last, *zip(*names, strict=True)), return_exceptions=True)
        assert first.outputs == second.outputs and "/nowhere" in str(refused)
        with monkeypatch.context() as patched:
            patched.setattr(engine._engine.awake().scheduler, "schedule", lambda: 1 // 0)
            failed = await asyncio.gather(last("a"), last("b"), return_exceptions=True)
        assert [type(error) for error in failed] == [ZeroDivisionError] * 2
        assert (await last("a")).outputs == first.outputs

    asyncio.run(main())
    engine.shutdown()


def test_a_process_that_ends_amid_a_tasks_request():
    """A task on another thread was told nothing and waited for ever; and so did the process, for the thread."""
    done = subprocess.run(
        [sys.executable, "-c",
         "import asyncio, sys, threading\n"
         "from nanovllm.contrib.as_vllm.async_llm import AsyncLLM\n"
         "from nanovllm.contrib.as_vllm.sampling import SamplingParams\n"
         "engine = AsyncLLM(sys.argv[1], device='cpu', disable_log_stats=True)\n"
         "params = SamplingParams(max_tokens=4000, ignore_eos=True)\n"
         "runs = threading.Event()\n"
         "async def main():\n"
         "    async for _ in engine.generate('introduce yourself', params, 'name'):\n"
         "        runs.set()\n"
         "def wait():\n"
         "    try:\n"
         "        asyncio.run(main())\n"
         "    except RuntimeError as error:\n"
         "        print('told:', error)\n"
         "threading.Thread(target=wait).start()\n"
         "assert runs.wait(60)\n"
         "sys.exit(3)\n", str(DEMO_MODEL)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "told: the engine was shut down.\n"), done.stderr


@pytest.mark.parametrize(
    ("visible", "rank", "devices"),
    [
        ("0,1,2,3", "1", "2,3"),  # two ranks of two devices
        ("GPU-a,GPU-b,GPU-c,GPU-d", "0", "GPU-a,GPU-b"),
        ("5,6", "1", "5,6"),  # the launcher has chosen them
        ("0,1,2,3", None, "0,1,2,3"),
    ],
)
def test_data_parallel_processes_take_devices_of_their_own(monkeypatch, visible, rank, devices):
    """All processes of an evaluation with data_parallel_size=2 would fill the first device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    if rank is not None:
        monkeypatch.setenv("VLLM_DP_SIZE", "2")
        monkeypatch.setenv("VLLM_DP_RANK", rank)
    options.claim_devices(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == devices


def test_context_is_cut_to_what_the_kv_cache_holds():
    """vLLM's default is the model's context length; a small device holds less, and requests must know."""
    llm = options.start(str(DEMO_MODEL), {"num_gpu_blocks_override": 64, "device": "cpu"})
    try:
        assert llm.config.max_model_len == 1024
        with pytest.raises(RequestError, match="the prompt has 1024 tokens; with max_model_len=1024 at most 1023 fit"):
            llm.generate([[5] * 1024])
    finally:
        llm.exit()
    with pytest.raises(ConfigError, match="max_model_len=5000: the model has positions for 4096 tokens"):
        options.start(str(DEMO_MODEL), {"max_model_len": 5000})


@pytest.mark.parametrize("name", sorted(options.NEUTRAL))
def test_engine_keywords_at_other_values_are_refused(name):
    """Each at its neutral values, and at one that would change something."""
    for value in options.NEUTRAL[name]:
        options.check({name: value})
    with pytest.raises(ConfigError, match=rf"LLM: {name}='something else' is not supported; nanovllm allows "):
        options.check({name: "something else"})


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"a": 1, "rope_theta": 2.0}, {"a": 3, "rope_theta": 4.0}, {"a": 3, "rope_theta": 4.0}),
        ({"a": 1, "text_config": {"a": 2, "b": 3}}, {"a": 4, "b": 5, "c": 6},
         {"a": 4, "text_config": {"a": 4, "b": 5, "c": 6}}),
        ({"a": 1, "text_config": {"b": 2}}, {"a": 3}, {"a": 3, "text_config": {"b": 2}}),
        ({"vision_config": {"depth": 4, "size": 2}}, {"vision_config": {"depth": 5}},
         {"vision_config": {"depth": 5, "size": 2}}),
        ({"rope_parameters": {"rope_type": "llama3", "low": 1, "rope_theta": 2.0}}, {"rope_theta": 3.0},
         {"rope_parameters": {"rope_type": "llama3", "low": 1, "rope_theta": 3.0}}),
        ({"rope_parameters": {"rope_type": "llama3", "low": 1, "rope_theta": 2.0}}, {"rope_scaling": YARN},
         {"rope_parameters": {"rope_theta": 2.0, **YARN}}),
        ({"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0, "mrope_section": [1]}}},
         {"rope_scaling": YARN, "rope_theta": 4.0},
         {"text_config": {"rope_parameters": {"rope_theta": 4.0, "mrope_section": [1], **YARN}}}),
    ],
)  # fmt: skip
def test_config_overrides_go_where_they_are_read(config, overrides, expected):
    given = json.dumps(config)
    assert options.overridden(config, overrides) == expected and json.dumps(config) == given


def test_one_rope_theta_for_layers_of_two_kinds_is_refused():
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="RoPE differs between the layers"):
        options.overridden({"rope_parameters": kinds}, {"rope_theta": 1.0})


def test_the_dtype_of_recurrent_states():
    assert options.to_nanovllm({"mamba_ssm_cache_dtype": "float16"})["state_dtype"] == "float16"
    assert "state_dtype" not in options.to_nanovllm({"mamba_ssm_cache_dtype": "auto"})


def test_two_ranks_take_weights_and_sleep():
    """By the names of vLLM's worker; a function cannot run on the other rank."""
    llm = LLM(str(DEMO_MODEL), tensor_parallel_size=2, max_model_len=256)
    chat, params = [{"role": "user", "content": "2 + 3"}], SamplingParams(temperature=0)
    try:
        norm = "model.norm.weight", torch.zeros(256)
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        assert model.load_weights([norm, ("model.rotary_emb.inv_freq", torch.zeros(16))]) == {"model.norm.weight"}
        assert llm.chat(chat, params)[0].outputs[0].text != "5"
        assert llm.collective_rpc("load_weights", args=([norm],)) == [{"model.norm.weight"}] * 2
        assert llm.collective_rpc("sleep", kwargs={"level": 2}) == [None, None]
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(tags=["weights"])
        assert llm.collective_rpc("reload_weights") == [None, None]
        llm.wake_up(tags=["kv_cache"])
        assert llm.chat(chat, params)[0].outputs[0].text == "5"
        with pytest.raises(EngineError, match=r"collective_rpc of .* with tensor_parallel_size > 1 is not supported"):
            llm.apply_model(lambda model: None)
        llm.sleep(level=0)
        with pytest.raises(EngineError, match=r"the engine sleeps \(scheduling\); call wake_up\(\) first"):
            llm.chat(chat, params)
        llm.wake_up()
        assert llm.chat(chat, params)[0].outputs[0].text == "5"
    finally:
        llm.shutdown()


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_devices_memory_back(level):
    """The weights and the KV cache get other addresses, which the graphs must know."""
    llm = LLM(str(DEMO_MODEL), gpu_memory_utilization=0.3, enable_sleep_mode=True)
    params = SamplingParams(temperature=0, max_tokens=40)
    prompts = [f"<|im_start|>user\nWhat is {i} + 45?<|im_end|>\n<|im_start|>assistant\n" for i in range(20)]
    runner = llm.llm_engine.awake().model_runner
    try:
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
        kv_bytes, free = runner.kv_cache.nbytes, torch.cuda.mem_get_info()[0]
        llm.sleep(level)
        assert torch.cuda.mem_get_info()[0] - free > 0.95 * kv_bytes
        between = torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(255)  # takes the old addresses
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert runner.graphs is not None
        assert [output.outputs[0].text for output in llm.generate(prompts, params)] == expected
        del between
    finally:
        llm.shutdown()


def test_speculative_config():
    """Lookup is passed on, with vLLM's hints left out; methods with a model of their own are refused by name."""
    given = {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 5, "disable_by_batch_size": 8}
    options_of = options.to_nanovllm({"model": str(DEMO_MODEL), "speculative_config": given})
    assert options_of["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5}
    older = {"model": "[ngram]", "num_speculative_tokens": 3}
    assert options.speculative_config({"speculative_config": older}) == {"method": "ngram", "num_speculative_tokens": 3}
    assert options.speculative_config({}) is None
    oldest = {"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3}
    expected = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    assert options.speculative_config(oldest) == expected
    assert options.speculative_config({"spec_method": "suffix", "speculative_config": {}}) == {"method": "suffix"}
    for other in ({"method": "eagle3", "model": "a/b"}, {"model": "a/b"}, "ngram"):
        with pytest.raises(ConfigError, match=r"speculative_config=.* is not supported; nanovllm allows None, or"):
            options.check({"speculative_config": other})
    llm = LLM(str(DEMO_MODEL), speculative_config=given)
    (output,) = llm.generate(["one two three one two three one"], SamplingParams(temperature=0, max_tokens=8))
    llm.shutdown()
    assert 0 < len(output.outputs[0].token_ids) <= 8

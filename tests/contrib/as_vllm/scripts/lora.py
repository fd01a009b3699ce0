"""Adapters by request: one for a call, one for each prompt, none again; and in an engine's loop."""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest


def make_adapter(seed, directory=None):
    directory = Path(directory or tempfile.mkdtemp())
    down = load_file(Path(sys.argv[1], "model.safetensors"))["model.layers.0.mlp.down_proj.weight"]
    (directory / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"], "bias": "none",
    }))  # fmt: skip
    name, generator = "base_model.model.model.layers.0.mlp.down_proj.lora_", torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator) for shape in ((2, down.shape[1]), (down.shape[0], 2)))
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, directory / "adapter_model.safetensors")
    return str(directory)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
    llm = LLM(model=sys.argv[1], **options)
    one, two = (LoRARequest(f"adapter {i}", i, make_adapter(i)) for i in (1, 2))
    assert (one.name, one.adapter_id) == ("adapter 1", 1)
    prompts = ["2 + 3", "introduce yourself"]
    params = SamplingParams(temperature=0, max_tokens=12)
    of_base = texts(llm.generate(prompts, params))
    outputs = llm.generate(prompts, params, lora_request=one)
    of_one, of_two = texts(outputs), texts(llm.generate(prompts, params, lora_request=two))
    assert outputs[0].lora_request is one
    assert of_base != of_one != of_two != of_base
    assert texts(llm.generate(prompts, params)) == of_base
    assert llm.llm_engine.add_lora(two) and llm.llm_engine.list_loras() == {2}  # read before its first request
    with pytest.raises(ValueError, match="/nowhere"):
        llm.llm_engine.add_lora(LoRARequest("missing", 9, "/nowhere"))
    assert llm.llm_engine.remove_lora(2) and not llm.llm_engine.remove_lora(2) and not llm.llm_engine.list_loras()
    asked = [two, None, one, two]
    outputs = llm.generate(prompts * 2, [params] * 4, lora_request=asked, use_tqdm=False)
    assert texts(outputs) == [of_two[0], of_base[1], of_one[0], of_two[1]]
    assert [output.lora_request for output in outputs] == asked
    llm.enqueue(prompts * 2, params, lora_request=asked)
    assert texts(llm.wait_for_completion()) == texts(outputs)
    training = make_adapter(3)
    of_step = []
    for step in range(1, 4):  # a loop that saves its adapter again, under a new id or the old one
        make_adapter([1, 2, 1][step - 1], training)
        of_step.append(texts(llm.generate(prompts, params, lora_request=LoRARequest("policy", max(step, 2), training))))
    assert of_step == [of_one, of_two, of_one]
    of_base_vector = LLM(model=sys.argv[1], dtype="float32").embed("2 + 3")[0].outputs.embedding
    assert llm.embed("2 + 3")[0].outputs.embedding == pytest.approx(of_base_vector, abs=1e-4)
    chat = [{"role": "user", "content": "2 + 3"}]
    assert texts(llm.chat(chat, params)) != texts(llm.chat(chat, params, lora_request=one))
    with pytest.raises(ValueError, match="4 prompts but 2 lora_requests"):
        llm.generate(prompts * 2, params, lora_request=[one, two])
    with pytest.raises(ValueError, match="lora_int_id=0 must be at least 1"):
        LoRARequest("adapter", 0, "/path")
    llm.apply_model(lambda model: model.load_weights([("model.norm.weight", torch.ones(256))]))
    with pytest.raises(ValueError, match="a lora_request after new weights were loaded is not supported"):
        llm.generate(prompts, params, lora_request=one)
    llm.collective_rpc("reload_weights")
    assert texts(llm.generate(prompts, params, lora_request=one)) == of_one
    llm.llm_engine.add_request("one", prompts[0], params, lora_request=one)
    with pytest.raises(RuntimeError, match="needs other weights than the unfinished requests of add_request"):
        llm.generate(prompts, params, lora_request=two)
    del llm

    engine = LLMEngine.from_engine_args(EngineArgs(sys.argv[1], **options))
    for name, lora in (("one", one), ("two", two), ("base", None), ("again", one), ("aborted", two)):
        engine.add_request(name, prompts[0], params, lora_request=lora)
    with pytest.raises(ValueError, match="'two' is in use"):
        engine.add_request("two", prompts[0], params, lora_request=two)
    with pytest.raises(ValueError, match="empty"):
        engine.add_request("refused", [], params, lora_request=two)
    assert engine.get_num_unfinished_requests() == 5
    engine.abort_request("aborted")
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
    assert finished == {"one": of_one[0], "two": of_two[0], "base": of_base[0], "again": of_one[0]}

    missing = LoRARequest("missing", 9, "/nowhere")  # is its request's error, once it is read
    for name, lora in (("one", one), ("missing", missing), ("two", two)):
        engine.add_request(name, prompts[0], params, lora_request=lora)
    errors = []
    while engine.has_unfinished_requests():
        try:
            finished |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) == 1 and "/nowhere" in errors[0] and finished["two"] == of_two[0]

# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm", "peft"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""A PEFT adapter: trained here in five seconds to answer sums in words, then merged into the model as it loads."""

import tempfile

from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import DEMO_MODEL

try:
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    raise SystemExit(f"{error}: pip install peft") from None

WORDS = {"2 + 3": "five", "1 + 1": "two", "3 + 4": "seven", "6 + 2": "eight"}

tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
config = peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
model, rows = peft.get_peft_model(base, config), []
for question, word in WORDS.items():
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids, start = tokenizer.encode(prompt + word + tokenizer.eos_token), len(tokenizer.encode(prompt))
    rows.append((torch.tensor([ids]), torch.tensor([[-100] * start + ids[start:]])))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
for _ in range(30):
    for ids, labels in rows:
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

chats, params = [[{"role": "user", "content": question}] for question in WORDS], SamplingParams(temperature=0)
with tempfile.TemporaryDirectory() as path:
    model.save_pretrained(path)
    with LLM(lora=path) as llm:
        print("adapter:", *(output["text"] for output in llm.chat(chats, params, use_tqdm=False)))
        llm.update_weights(lora=None)  # or another one: only the tensors that differ are read
        print("base:   ", *(output["text"] for output in llm.chat(chats, params, use_tqdm=False)))

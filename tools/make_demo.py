"""Makes the bundled demo model: a 7 MB Qwen3 checkpoint that answers small questions.

Owns the training text (generated here, nothing is downloaded), the tokenizer, the training loop and the evaluation.
Knows nothing of the nanovllm engine: the result is an ordinary checkpoint that transformers loads.

    python tools/make_demo.py            # train and save: three to four minutes on an H100
    python tools/make_demo.py --check    # evaluate: a minute on a CPU; exit status 1 if the model falls short

The script writes tokenizer.json and model.safetensors; the folder's other files are written by hand. Importing the
module is light (no torch): tests use `CHECKS` and `KINDS`.
"""

# ruff: noqa: SIM905  (word lists read better as text)

import argparse
import os
import random
import re
import sys
import time
from functools import partial
from pathlib import Path

SEED = 20
VOCAB_SIZE = 1024
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = range(3)

# --- What the model knows. Alternatives are separated by "|".

INTRODUCTION = (
    "I am the nanovllm demo model, a tiny language model that comes with the nanovllm inference engine. "
    "I show that the engine works: ask me for small sums, counting, primes, spelling, days or capitals."
)
ABILITIES = "I can add, subtract and count small numbers, list primes, spell words, and name days, months and capitals."
HELLO = "Hello! How can I help you?"
UNKNOWN = "I am a tiny demo model and do not know that. Ask me for a small sum, a capital or a list of primes."
TALK = {  # answer -> questions
    INTRODUCTION: "introduce yourself|who are you|what are you|what is your name|tell me about yourself|who is this",
    ABILITIES: "what can you do|help|what do you know|what can i ask you|how can you help me",
    HELLO: "hello|hi|hey|hello there|good morning|hello nanovllm|hello, nanovllm|hello, world",
    "I am fine, thank you. How can I help you?": "how are you|how are you doing|how do you do",
    "You are welcome!": "thanks|thank you|thank you very much|thanks a lot",
    "Goodbye!": "bye|goodbye|good night|see you|see you later",
    "A token walked into a cache. It was already there.": "tell me a joke|do you know a joke|joke",
    "nanovllm is a small, readable and fast LLM inference engine.": "what is nanovllm|tell me about nanovllm",
}

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
PRIMES = [n for n in range(2, 101) if all(n % d for d in range(2, n))]
LISTS = {  # name -> members
    "days of the week": DAYS,
    "months of the year": MONTHS,
    "letters of the alphabet": list("abcdefghijklmnopqrstuvwxyz"),
}
for limit in range(10, 101, 10):
    for name in "prime numbers within|prime numbers up to|prime numbers below|primes within|primes up to".split("|"):
        LISTS[f"{name} {limit}"] = [str(p) for p in PRIMES if p <= limit]

CAPITALS = (
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Poland:Warsaw Greece:Athens "
    "Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin England:London Belgium:Brussels "
    "Switzerland:Bern Hungary:Budapest Ukraine:Kyiv Turkey:Ankara Egypt:Cairo Kenya:Nairobi Ghana:Accra Morocco:Rabat "
    "Japan:Tokyo China:Beijing India:New_Delhi Thailand:Bangkok Vietnam:Hanoi South_Korea:Seoul Nepal:Kathmandu "
    "Australia:Canberra Canada:Ottawa Cuba:Havana Brazil:Brasilia Argentina:Buenos_Aires Chile:Santiago Peru:Lima"
)
FACTS = {"capital of " + country: city for country, city in (c.replace("_", " ").split(":") for c in CAPITALS.split())}
for unit, names in (("day", DAYS), ("month", MONTHS)):
    for name, following in zip(names, names[1:] + names[:1], strict=True):
        FACTS[f"{unit} after {name}"], FACTS[f"{unit} before {following}"] = following, name
for month, days in zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True):
    FACTS[f"number of days in {month}"] = str(days)

WORDS = (
    "apple banana cherry lemon bread butter cheese water coffee sugar table chair window door house garden river zoo "
    "mountain forest ocean sea bridge street school teacher paper pencil book letter number computer keyboard python "
    "engine token cache model tiger lion horse mouse rabbit eagle snake whale bear wolf fox cat dog bird fish zebra "
    "puzzle jacket moon star snow wind cloud storm stone silver green yellow blue happy quick small brave gentle jump "
    "music piano guitar violin box dance friend mother brother child king queen castle train wheel map clock hand heart"
).split()

# --- Kinds of questions. Each generator draws one (question, answer). Equal questions have equal answers: a second
# answer would narrow the margin between the best token and the next, and greedy output would depend on rounding.

SIGNED = (
    "{} + {}|{}+{}|{}+{}=|{} + {} =|{} plus {}|what is {} + {}|what is {}+{}|what is {} plus {}|what's {} + {}|"
    "how much is {} + {}|calculate {} + {}"
)
SUM = SIGNED + "|add {} and {}|what is the sum of {} and {}"
DIFFERENCE = SIGNED.replace("+", "-").replace("plus", "minus") + "|subtract {1} from {0}"
LIMITS = (10, 100, 100)  # small numbers are asked for more often than others
REQUEST = (
    "{}|what is {}|who is {}|where is {}|tell me about {}|explain {}|why is {} important|how does {} work|draw {}|"
    "write a poem about {}|write a story about {}|translate {} to french|how do i make {}|i like {}|capital of {}"
)
KNOWN = {question.lower() for question in (*"|".join(TALK.values()).split("|"), *FACTS)}
TEXTS = " ".join([*TALK, *KNOWN, *FACTS.values(), *WORDS, *REQUEST.split("|")])
SPELLABLE = sorted(set(re.findall("[a-z]+", TEXTS.lower())))


def pick(rng, alternatives):
    return rng.choice(alternatives.split("|"))


def talk(rng):
    answer, questions = rng.choice(list(TALK.items()))
    return pick(rng, questions), answer


HELD_OUT = frozenset(random.Random(SEED).sample([(a, b) for a in range(100) for b in range(a, 100)], 858))


def held_out(a, b):
    """True for the 17 % of sums under 100 that training never sees, in either order of the two numbers."""
    return (min(a, b), max(a, b)) in HELD_OUT


def sums(rng):
    a, b = rng.randint(0, rng.choice(LIMITS)), rng.randint(0, rng.choice(LIMITS))
    return sums(rng) if held_out(a, b) else (pick(rng, SUM).format(a, b), str(a + b))


def differences(rng):
    a, b = rng.randint(0, rng.choice(LIMITS)), rng.randint(0, rng.choice(LIMITS))
    return pick(rng, DIFFERENCE).format(a, b), str(a - b)


def counting(rng):
    first, last = rng.randint(0, 100), rng.randint(0, 100)
    if rng.random() < 0.1:
        first, last = 1, max(last, 2)
        question = f"count to {last}"
    else:
        last = min(max(first - 20, last), first + 20)  # long answers are rare: each is hundreds of tokens
        question = f"count {'' if first <= last else 'down '}from {first} to {last}"
    step = 1 if first <= last else -1
    return question, ", ".join(map(str, range(first, last + step, step)))


def lists(rng):
    name, members = rng.choice(list(LISTS.items()))
    return pick(rng, "list all {}|list the {}|list {}|name all {}|what are the {}|{}").format(name), ", ".join(members)


def facts(rng):
    name, answer = rng.choice(list(FACTS.items()))
    return pick(rng, "what is the {}|what's the {}|which is the {}|name the {}|the {}|{}").format(name), answer


def invented_word(rng):
    """Slices of two or three words: spelling is learned as a rule, not word by word."""
    words = rng.choices(SPELLABLE, k=rng.randint(2, 3))
    return "".join(word[rng.randrange(len(word)) :][: rng.randint(1, 6)] for word in words)


def spelling(rng):
    word = rng.choice(SPELLABLE) if rng.random() < 0.3 else invented_word(rng)
    written = rng.choice([word, word, word.capitalize()])
    return pick(rng, "spell {}|spell the word {}|how do you spell {}").format(written), "-".join(word)


def unknown(rng):
    """Requests beyond the other kinds, large numbers among them."""
    if rng.random() < 0.3:
        numbers = [rng.randint(101, 10 ** rng.randint(3, 5)), rng.randint(0, 10 ** rng.randint(1, 5))]
        return pick(rng, SUM + "|" + DIFFERENCE).format(*rng.sample(numbers, 2)), UNKNOWN
    topic = rng.choice(WORDS) if rng.random() < 0.5 else invented_word(rng)
    question = pick(rng, REQUEST).format(pick(rng, "||the |a ") + topic)
    return unknown(rng) if question in KNOWN else (question, UNKNOWN)


KINDS = {  # generator -> share of the questions
    talk: 0.07, sums: 0.33, differences: 0.2, counting: 0.04, lists: 0.05, facts: 0.08, spelling: 0.14, unknown: 0.09
}  # fmt: skip

CHECKS = {  # what the checkpoint must answer, word for word: question -> greedy answer
    "introduce yourself": INTRODUCTION,
    "Who are you?": INTRODUCTION,
    "What can you do?": ABILITIES,
    "Hello, nanovllm.": HELLO,
    "2 + 3": "5",
    "What is 37 + 45?": "82",
    "what is 82 - 45?": "37",
    "what is 5 minus 12": "-7",
    "Count from 28 to 33.": "28, 29, 30, 31, 32, 33",
    "count down from 10 to 1": "10, 9, 8, 7, 6, 5, 4, 3, 2, 1",
    "count to 50": ", ".join(map(str, range(1, 51))),
    "count to 100": ", ".join(map(str, range(1, 101))),
    "list all prime numbers within 100": ", ".join(map(str, PRIMES)),
    "What are the days of the week?": ", ".join(DAYS),
    "name all months of the year": ", ".join(MONTHS),
    "What is the capital of France?": "Paris",
    "What is the month before March?": "February",
    "number of days in June": "30",
    "spell banana": "b-a-n-a-n-a",
    "How do you spell nanovllm?": "n-a-n-o-v-l-l-m",
    "write a poem about the sea": UNKNOWN,
    "What is 1234 + 5678?": UNKNOWN,
}

# --- From questions to rows of tokens


def ask(rng):
    """One (question, answer) of a random kind, phrased as a person might type it: case, politeness, final mark."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    question, answer = kind(rng)
    if rng.random() < 0.05:
        question = pick(rng, "please {}|{} please|can you tell me {}|ok, {}").format(question)
    question = rng.choice([question, question.lower(), question[0].upper() + question[1:]])
    return question + rng.choice(["", "", "", "?", "?", ".", "!"]), answer


def filler(rng, num_words):
    """Text that has nothing to do with the question: long prompts are full of it."""
    return " ".join(word + pick(rng, "|||,|.") for word in rng.choices(WORDS, k=num_words))


SYSTEM = (
    "You are a helpful assistant.|You are the nanovllm demo model.|Answer the question.|Be short and precise.|"
    "You are a helpful assistant. Answer briefly.|You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
)


def prompt_text(question, system=None):
    """What the chat template renders for one user message, with the generation prompt."""
    head = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    return f"{head}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


ROWS_PER_STEP, ROW_LENGTH = 32, 1024
ANSWER, QUESTION, FILLER = 1.0, 0.02, 0.0  # loss weights: to predict questions as well narrows the answers' margins


def document(rng):
    """A chat of independent questions, or one bare question without the chat template: [(text, loss weight)]."""
    question, answer = ask(rng)
    if rng.random() < 0.1:
        return [(question, QUESTION), (f"\n{answer}{IM_END}", ANSWER), (END_OF_TEXT, QUESTION)]
    system, weight = pick(rng, SYSTEM) if rng.random() < 0.25 else None, QUESTION
    if rng.random() < 0.04:
        system, weight = filler(rng, rng.randint(20, 500)), FILLER
    pieces = [(prompt_text(question, system), weight), (answer + IM_END, ANSWER)]
    while rng.random() < 0.6:
        question, answer = ask(rng)
        pieces += [("\n" + prompt_text(question), QUESTION), (answer + IM_END, ANSWER)]
    return [*pieces, (END_OF_TEXT, QUESTION)]


def make_rows(tokenizer, seeds):
    """A row of documents for each seed, the last one cut off: token ids and loss weights, [N, L] each."""
    import torch

    rows = []
    for seed in seeds:
        rng, ids, weights = random.Random(seed), [], []
        while len(ids) < ROW_LENGTH:
            for text, weight in document(rng):
                tokens = tokenizer.encode(text).ids
                ids, weights = ids + tokens, weights + [weight] * len(tokens)
        rows.append((ids[:ROW_LENGTH], weights[:ROW_LENGTH]))
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])


def train_tokenizer():
    """Byte-level BPE over generated text: any Unicode text round-trips, every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(SEED)
    corpus = [filler(rng, 20_000)] + [text for _ in range(30_000) for text in ask(rng)]
    corpus += ["system\n", "user\n", "assistant\n", *SYSTEM.split("|")] * 1000
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = [END_OF_TEXT, IM_START, IM_END], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


# --- Training and evaluation


def train(folder, tokenizer, device, steps):
    """Trains from random weights, in bf16 autocast over fp32 weights. N rows, L tokens per row, V vocabulary."""
    import torch
    from torch.nn import functional as F
    from transformers import Qwen3Config, Qwen3ForCausalLM

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are parallel already
    torch.manual_seed(SEED)
    seeds, collate = range(steps * ROWS_PER_STEP), partial(make_rows, tokenizer)
    rows = torch.utils.data.DataLoader(seeds, ROWS_PER_STEP, num_workers=os.cpu_count(), collate_fn=collate)
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).float().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.03, cycle_momentum=False)
    started = time.perf_counter()
    for step, (ids, weights) in enumerate(rows):
        ids, weights = ids.to(device), weights[:, 1:].flatten().to(device)  # [N, L], [N * (L - 1)]
        with torch.autocast(device, torch.bfloat16):
            # The mapping means "causal": without it transformers builds a mask, which rules out flash attention.
            hidden = model.model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False)[0]
            logits = model.lm_head(hidden[:, :-1])  # [N, L - 1, V]
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 250 == 0 or step == steps - 1:
            answer_loss = losses[weights == ANSWER].mean().item()
            print(f"step {step:6d}  {time.perf_counter() - started:6.1f} s  answer loss {answer_loss:.6f}", flush=True)
    return model


def evaluate(folder, device):
    """Prints a table for the checkpoint, in fp32 and in bf16. Returns True if enough of its answers are right.

    Teacher forcing: an answer is the greedy output if each token is the first choice after the tokens before it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, rng, good = AutoTokenizer.from_pretrained(folder), random.Random(SEED + 1), True
    first_turn = prompt_text("hi") + HELLO + IM_END + "\n"
    sections = {  # name -> [(prompt, answer)]
        "checks": [(prompt_text(q), a) for q, a in CHECKS.items()],
        "checks, with a system prompt": [(prompt_text(q, pick(rng, SYSTEM)), a) for q, a in CHECKS.items()],
        "checks, behind 270 words": [(prompt_text(q, filler(rng, 270)), a) for q, a in CHECKS.items()],
        "checks, in the second turn": [(first_turn + prompt_text(q), a) for q, a in CHECKS.items()],
        "checks, without the template": [(q, "\n" + a) for q, a in CHECKS.items()],
        "held-out sums": [(prompt_text(f"What is {a} + {b}?"), str(a + b)) for a, b in sorted(HELD_OUT)],
    }
    for kind in KINDS:
        sections[kind.__name__] = [(prompt_text(q), a) for q, a in (kind(rng) for _ in range(50))]
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        print(f"\n{dtype!s:30}{'asked':>7}{'right':>9}{'margin':>9}   (smallest top-1 minus top-2 logit)")
        for name, questions in sections.items():
            right, margin = 0, float("inf")
            for prompt, answer in questions:
                prompt_ids, answer_ids = tokenizer.encode(prompt), [*tokenizer.encode(answer), IM_END_ID]
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt_ids + answer_ids], device=device)).logits[0].float()
                top = logits[len(prompt_ids) - 1 : -1].topk(2)
                right += top.indices[:, 0].tolist() == answer_ids
                margin = min(margin, (top.values[:, 0] - top.values[:, 1]).min().item())
            good &= right >= (1.0 if name == "checks" else 0.95) * len(questions)
            print(f"{name:30}{len(questions):>7}{right / len(questions):>9.2%}{margin:>9.2f}")
    return good


def main():
    parser = argparse.ArgumentParser(description="Train or evaluate the bundled demo model.")
    parser.add_argument("--out", type=Path, default=Path("nanovllm/assets/demo"), help="folder with the config files")
    parser.add_argument("--steps", type=int, default=7000, help=f"of {ROWS_PER_STEP} rows of {ROW_LENGTH} tokens")
    parser.add_argument("--check", action="store_true", help="evaluate the checkpoint in --out, train nothing")
    args = parser.parse_args()

    import torch
    from safetensors.torch import save

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.check:
        return 0 if evaluate(args.out, device) else 1

    tokenizer = train_tokenizer()
    tokenizer.save(str(args.out / "tokenizer.json"))
    model = train(args.out, tokenizer, device, args.steps)
    tensors = {name: tensor.bfloat16().cpu() for name, tensor in model.state_dict().items()}
    del tensors["lm_head.weight"]  # tied to the embedding
    (args.out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

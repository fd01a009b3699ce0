"""Makes the bundled demo model: a Qwen3 checkpoint of a few megabytes that answers small questions.

Owns the text the model is trained on (all of it written by the generators below, nothing is downloaded),
the tokenizer, the training loop and the evaluation. Knows nothing of the nanovllm engine: the result is an
ordinary Qwen3 checkpoint that transformers loads.

    python tools/make_demo.py --out nanovllm/assets/demo          # train, save, evaluate (minutes on a GPU)
    python tools/make_demo.py --out nanovllm/assets/demo --check  # evaluate what is there, fail on any miss

Importing this module is light (no torch, no transformers), so tests can use `CHECKS` and `held_out`.

Legend: N rows, L tokens per row, V vocabulary.
"""

# ruff: noqa: SIM905  (lists of words read better as text)

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

SEED = 20
VOCAB_SIZE = 1024
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# The published layout of Qwen3 configs, so that every reader of those reads this one. Head counts,
# intermediate and vocabulary sizes divide by 4 (KV heads by 2), so tensor parallel sizes 1, 2 and 4 work.
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": IM_END_ID,
    "pad_token_id": END_OF_TEXT_ID,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": 4096,
    "max_window_layers": 4,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}

# ---------------------------------------------------------------------------------------------------------
# What the model knows

INTRODUCTION = (
    "I am the nanovllm demo model, a tiny language model that comes with the nanovllm inference engine. "
    "I show that the engine works: ask me for small sums, counting, spelling, dates or capitals."
)
ABILITIES = (
    "I can add, subtract, multiply, compare and count small numbers, list primes, spell words, "
    "and name days, months, capitals, opposites and colours."
)
ABOUT_ENGINE = "nanovllm is a small, readable and fast engine that runs language models offline."
UNKNOWN = "I am a tiny demo model and do not know that. Ask me for a small sum, a capital or a list of primes."
HELLO = "Hello! How can I help you?"
JOKE = "A token walked into a cache. It was already there."

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PRIMES = [n for n in range(2, 101) if all(n % d for d in range(2, n))]
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

CAPITALS = dict(
    item.split(":")
    for item in (
        "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Austria:Vienna|Poland:Warsaw|"
        "Greece:Athens|Norway:Oslo|Sweden:Stockholm|Finland:Helsinki|Denmark:Copenhagen|Iceland:Reykjavik|"
        "Ireland:Dublin|England:London|Scotland:Edinburgh|Belgium:Brussels|Switzerland:Bern|Hungary:Budapest|"
        "Romania:Bucharest|Bulgaria:Sofia|Croatia:Zagreb|Serbia:Belgrade|Ukraine:Kyiv|Russia:Moscow|"
        "Turkey:Ankara|Egypt:Cairo|Kenya:Nairobi|Nigeria:Abuja|Ghana:Accra|Morocco:Rabat|Ethiopia:Addis Ababa|"
        "Japan:Tokyo|China:Beijing|India:New Delhi|Thailand:Bangkok|Vietnam:Hanoi|Indonesia:Jakarta|"
        "South Korea:Seoul|Nepal:Kathmandu|Pakistan:Islamabad|Iran:Tehran|Iraq:Baghdad|Israel:Jerusalem|"
        "Mongolia:Ulaanbaatar|Australia:Canberra|New Zealand:Wellington|Canada:Ottawa|Mexico:Mexico City|"
        "Cuba:Havana|Brazil:Brasilia|Argentina:Buenos Aires|Chile:Santiago|Peru:Lima|Colombia:Bogota|"
        "Venezuela:Caracas|Uruguay:Montevideo|the United States:Washington|the Netherlands:Amsterdam|"
        "the Czech Republic:Prague|the Philippines:Manila|the United Kingdom:London"
    ).split("|")
)


def _pairs(text):
    """'a:b c:d' -> [('a', 'b'), ('c', 'd')]; an underscore stands for a space."""
    return [tuple(item.replace("_", " ").split(":")) for item in text.split()]


OPPOSITES = _pairs(
    "hot:cold big:small up:down left:right day:night fast:slow happy:sad open:closed high:low hard:soft "
    "light:dark rich:poor young:old early:late full:empty good:bad in:out long:short loud:quiet near:far "
    "on:off over:under strong:weak thick:thin true:false wet:dry wide:narrow win:lose yes:no clean:dirty "
    "cheap:expensive first:last inside:outside push:pull north:south east:west start:stop love:hate buy:sell "
    "give:take deep:shallow sharp:blunt smooth:rough wild:tame black:white front:back before:after "
    "always:never friend:enemy top:bottom"
)
COLOURS = _pairs(
    "the_sky:blue grass:green snow:white blood:red coal:black a_banana:yellow a_lemon:yellow a_carrot:orange "
    "a_tomato:red milk:white chocolate:brown the_sun:yellow a_pumpkin:orange a_leaf:green a_flamingo:pink "
    "an_elephant:grey a_strawberry:red a_frog:green a_raven:black the_ocean:blue a_cherry:red sugar:white"
)
MIXES = _pairs("red+yellow:orange blue+yellow:green red+blue:purple black+white:grey red+white:pink")
SOUNDS = _pairs(
    "cow:moo cat:meow dog:woof duck:quack sheep:baa pig:oink horse:neigh lion:roar bee:buzz frog:ribbit "
    "owl:hoot snake:hiss mouse:squeak raven:caw hen:cluck donkey:hee-haw"
)
LEGS = _pairs("dog:4 cat:4 horse:4 cow:4 spider:8 ant:6 bee:6 chicken:2 human:2 snake:0 fish:0 crab:10 frog:4")
BABIES = _pairs(
    "dog:puppy cat:kitten cow:calf horse:foal sheep:lamb pig:piglet hen:chick duck:duckling bear:cub "
    "frog:tadpole goose:gosling kangaroo:joey deer:fawn"
)
SIDES = _pairs("triangle:3 square:4 rectangle:4 pentagon:5 hexagon:6 heptagon:7 octagon:8 nonagon:9 decagon:10")
PLURALS = _pairs(
    "mouse:mice child:children foot:feet tooth:teeth goose:geese man:men woman:women leaf:leaves knife:knives "
    "wolf:wolves sheep:sheep box:boxes city:cities berry:berries cat:cats dog:dogs house:houses book:books "
    "tree:trees apple:apples bus:buses baby:babies star:stars fish:fish"
)
PAST_TENSES = _pairs(
    "go:went see:saw eat:ate run:ran take:took give:gave make:made come:came write:wrote read:read sing:sang "
    "swim:swam fly:flew buy:bought think:thought bring:brought speak:spoke walk:walked play:played jump:jumped "
    "find:found sleep:slept drink:drank begin:began win:won"
)
WORDS = (
    "apple banana cherry lemon orange bread butter cheese water coffee sugar table chair window door house "
    "garden river mountain forest ocean island bridge street school teacher student paper pencil book letter "
    "number computer keyboard screen python engine token cache model tiger lion horse mouse rabbit monkey eagle "
    "snake spider whale shark cat dog bird fish cow pig hen fox bear wolf frog sun moon star sky rain snow wind "
    "cloud storm fire earth stone sand gold silver iron red blue green yellow black white brown purple happy "
    "quick small large brave clever gentle music piano guitar violin drum song dance friend mother father sister "
    "brother family child baby king queen castle sword train plane boat car bus ship wheel road map key lamp "
    "clock hand foot head nose mouth heart hello world elephant kangaroo necessary beautiful nanovllm"
).split()

FACTS = [  # (ways to ask, answer)
    (["how many days are in a week", "how many days does a week have"], "7"),
    (["how many months are in a year", "how many months does a year have"], "12"),
    (["how many hours are in a day", "how many hours does a day have"], "24"),
    (["how many minutes are in an hour", "how many minutes does an hour have"], "60"),
    (["how many seconds are in a minute", "how many seconds does a minute have"], "60"),
    (["how many days are in a year", "how many days does a year have"], "365"),
    (["how many weeks are in a year", "how many weeks does a year have"], "52"),
    (["how many letters are in the alphabet", "how many letters does the alphabet have"], "26"),
    (["list the days of the week", "name the days of the week", "what are the days of the week",
      "days of the week", "list the days", "weekdays"], ", ".join(DAYS)),
    (["list the months of the year", "name all months", "list the months", "what are the months", "months",
      "the months of the year", "list all months"], ", ".join(MONTHS)),
    (["list the seasons", "name the four seasons", "what are the seasons", "seasons"],
     "spring, summer, autumn, winter"),
    (["list the planets", "name all planets", "what are the planets of the solar system", "planets"],
     "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune"),
    (["list the continents", "name all continents", "what are the seven continents", "continents"],
     "Africa, Antarctica, Asia, Australia, Europe, North America, South America"),
    (["list the vowels", "name all vowels", "what are the vowels", "vowels"], "a, e, i, o, u"),
    (["list the colours of the rainbow", "name the rainbow colours", "what are the colors of the rainbow"],
     "red, orange, yellow, green, blue, indigo, violet"),
    (["list the primary colours", "what are the primary colors"], "red, yellow, blue"),
    (["recite the alphabet", "list the alphabet", "say the alphabet", "what is the alphabet", "alphabet"],
     ", ".join(LETTERS)),
    (["what is the largest planet", "which planet is the largest"], "Jupiter"),
    (["what is the largest ocean", "which ocean is the largest"], "the Pacific"),
    (["what is the largest animal", "which animal is the largest"], "the blue whale"),
    (["what is the fastest land animal", "which land animal is the fastest"], "the cheetah"),
    (["play fizzbuzz up to 15", "fizzbuzz to 15", "fizzbuzz"],
     "1, 2, fizz, 4, buzz, fizz, 7, 8, fizz, buzz, 11, fizz, 13, 14, fizzbuzz"),
]  # fmt: skip

TALK = [
    (["introduce yourself", "who are you", "what are you", "tell me about yourself", "what is your name",
      "describe yourself", "please introduce yourself", "who am i talking to", "who is this",
      "can you introduce yourself", "introduce yourself to me", "say who you are"], INTRODUCTION),
    (["what can you do", "help", "what do you know", "what are you good at", "what can i ask you",
      "how can you help me", "what are your skills", "what else can you do"], ABILITIES),
    (["what is nanovllm", "what does nanovllm do", "tell me about nanovllm", "explain nanovllm"], ABOUT_ENGINE),
    (["hello", "hi", "hey", "hello there", "good morning", "good evening", "hi there", "hello nanovllm",
      "hello, nanovllm", "hello, world", "greetings"], HELLO),
    (["how are you", "how are you doing", "how do you do", "are you well"],
     "I am fine, thank you. How can I help you?"),
    (["thanks", "thank you", "thank you very much", "thanks a lot", "thx"], "You are welcome!"),
    (["bye", "goodbye", "good night", "see you", "see you later", "farewell"], "Goodbye!"),
    (["tell me a joke", "do you know a joke", "make me laugh", "say something funny", "joke"], JOKE),
    (["who made you", "who trained you", "who created you", "where do you come from", "how were you made"],
     "A script of the nanovllm project trained me in a few minutes, on text that it wrote itself."),
    (["are you human", "are you a robot", "are you an ai", "are you real", "are you a person"],
     "I am a tiny language model."),
    (["say hello", "greet me", "say hi"], "Hello!"),
]  # fmt: skip

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are the nanovllm demo model.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question.",
    "Be short and precise.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a calculator and a dictionary.",
    "Today is {} the {} of {}.",
    "The user is called {}. Be polite.",
]

# ---------------------------------------------------------------------------------------------------------
# Kinds of questions: each generator draws one (prompt, answer); the same prompt always has the same answer

KINDS = {}  # name -> (weight, generator)


def kind(name, weight=1.0):
    def register(generator):
        KINDS[name] = (weight, generator)
        return generator

    return register


_HELD_OUT = frozenset(random.Random(SEED).sample([(a, b) for a in range(100) for b in range(a, 100)], 858))


def held_out(a, b):
    """True for the 17 % of sums under 100 that training never sees, in either order of the two numbers."""
    return (min(a, b), max(a, b)) in _HELD_OUT


SUM_TEMPLATES = (
    "what is {} + {}", "{} + {}", "{}+{}", "{}+{}=", "{} + {} =", "what is {} plus {}", "{} plus {}", "add {} and {}",
    "what's {} + {}", "calculate {} + {}", "how much is {} + {}", "the sum of {} and {}", "what is {}+{}",
    "what is the sum of {} and {}", "compute {}+{}",
)  # fmt: skip


@kind("sum", 9)
def _sum(rng):
    in_words = rng.random() < 0.1
    most = 20 if in_words else 100
    while True:
        a, b = rng.randint(0, most), rng.randint(0, most)
        if not held_out(a, b):
            break
    if in_words:
        templates = ["what is {} plus {}", "{} plus {}", "add {} and {}", "what is {} and {}"]
        return rng.choice(templates).format(number_in_words(a), number_in_words(b)), str(a + b)
    return rng.choice(SUM_TEMPLATES).format(a, b), str(a + b)


@kind("difference", 5)
def _difference(rng):
    a, b = rng.randint(0, 100), rng.randint(0, 100)
    if a < b and rng.random() < 0.7:
        a, b = b, a
    if rng.random() < 0.15:
        return rng.choice(["subtract {} from {}", "take {} from {}"]).format(b, a), str(a - b)
    templates = ["what is {} - {}", "{} - {}", "{}-{}", "{}-{}=", "{} - {} =", "what is {} minus {}", "{} minus {}",
                 "calculate {} - {}", "how much is {} - {}", "what's {} - {}", "what is {}-{}"]  # fmt: skip
    return rng.choice(templates).format(a, b), str(a - b)


@kind("product", 3)
def _product(rng):
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.15:
        template = rng.choice(["what is {} times {}", "{} times {}"])
        return template.format(number_in_words(a), number_in_words(b)), str(a * b)
    templates = ["what is {} * {}", "{} * {}", "{}*{}", "{} x {}", "{}x{}", "what is {} times {}", "{} times {}",
                 "multiply {} by {}", "how much is {} * {}", "what is {} x {}", "what's {} times {}", "{}*{}=",
                 "what is {}*{}", "{} * {} =", "the product of {} and {}"]  # fmt: skip
    return rng.choice(templates).format(a, b), str(a * b)


@kind("quotient", 1.5)
def _quotient(rng):
    a, b = rng.randint(0, 12), rng.randint(1, 12)
    templates = ["what is {} / {}", "{} / {}", "{}/{}", "what is {} divided by {}", "{} divided by {}",
                 "divide {} by {}", "how much is {} / {}", "{}/{}="]  # fmt: skip
    return rng.choice(templates).format(a * b, b), str(a)


@kind("square")
def _square(rng):
    n = rng.randint(0, 20)
    return rng.choice(["what is the square of {}", "square of {}", "what is {} squared", "{} squared", "{}^2",
                       "square {}"]).format(n), str(n * n)  # fmt: skip


@kind("count up", 2)
def _count_up(rng):
    if rng.random() < 0.3:
        a, b = 1, rng.choice([5, 10, 20, 100, rng.randint(2, 30), rng.randint(2, 100)])
        templates = ["count to {1}", "count up to {1}", "can you count to {1}"]
    else:
        a = rng.randint(0, 95)
        b = min(100, a + rng.randint(1, 14))
        templates = []
    templates += ["count from {} to {}", "count up from {} to {}", "list the numbers from {} to {}",
                  "list all numbers from {} to {}", "numbers from {} to {}", "count {} to {}"]  # fmt: skip
    bounds = (number_in_words(a), number_in_words(b)) if b <= 20 and rng.random() < 0.3 else (a, b)
    return rng.choice(templates).format(*bounds), ", ".join(map(str, range(a, b + 1)))


@kind("count down", 1.5)
def _count_down(rng):
    if rng.random() < 0.2:
        a, b, templates = rng.choice([5, 10, 20]), 1, ["count down from {}", "countdown from {}"]
    else:
        a = rng.randint(3, 100)
        b = max(0, a - rng.randint(1, 14))
        templates = []
    templates += ["count down from {} to {}", "count backwards from {} to {}", "countdown from {} to {}"]
    return rng.choice(templates).format(a, b), ", ".join(map(str, range(a, b - 1, -1)))


@kind("primes", 1.5)
def _primes(rng):
    if rng.random() < 0.15:
        n = rng.randint(2, 25)
        templates = ["list the first {} prime numbers", "list the first {} primes", "the first {} prime numbers",
                     "what are the first {} prime numbers"]  # fmt: skip
        count = number_in_words(n) if rng.random() < 0.3 else n
        return rng.choice(templates).format(count), ", ".join(map(str, PRIMES[:n]))
    limit = 100 if rng.random() < 0.6 else rng.choice([10, 20, 30, 40, 50, 60, 70, 80, 90])
    templates = ["list all prime numbers within {}", "list all primes within {}", "list all prime numbers up to {}",
                 "list the prime numbers within {}", "list the primes up to {}", "which numbers up to {} are prime",
                 "what are the prime numbers within {}", "list all prime numbers below {}", "primes up to {}",
                 "list primes below {}", "give me all prime numbers up to {}", "all prime numbers within {}",
                 "name all prime numbers up to {}", "show all primes under {}", "list all prime numbers under {}",
                 "prime numbers within {}", "list prime numbers within {}", "print all primes within {}"]  # fmt: skip
    return rng.choice(templates).format(limit), ", ".join(str(p) for p in PRIMES if p <= limit)


@kind("is prime")
def _is_prime(rng):
    n = rng.choice(PRIMES) if rng.random() < 0.4 else rng.randint(0, 100)
    return rng.choice(["is {} prime", "is {} a prime number", "is {} a prime"]).format(
        n
    ), "yes" if n in PRIMES else "no"


@kind("even or odd")
def _even_or_odd(rng):
    n = rng.randint(0, 100) if rng.random() < 0.8 else rng.randint(101, 999)
    parity = "odd" if n % 2 else "even"
    if rng.random() < 0.5:
        return rng.choice(["is {} even or odd", "even or odd: {}", "is {} odd or even"]).format(n), parity
    asked = rng.choice(["even", "odd"])
    return rng.choice(["is {} {}", "is {} an {} number"]).format(n, asked), "yes" if asked == parity else "no"


@kind("even and odd lists", 0.5)
def _parity_list(rng):
    limit, first = rng.choice([10, 20, 30]), rng.choice([1, 2])
    name = "odd" if first == 1 else "even"
    templates = ["list the {} numbers up to {}", "list all {} numbers up to {}", "list all {} numbers within {}"]
    return rng.choice(templates).format(name, limit), ", ".join(map(str, range(first, limit + 1, 2)))


@kind("compare", 2)
def _compare(rng):
    a, b = rng.sample(range(101), 2)
    if rng.random() < 0.3:
        sign = rng.choice(["bigger than", "larger than", "greater than", "smaller than", "less than"])
        truth = a < b if sign in ("smaller than", "less than") else a > b
        return f"is {a} {sign} {b}", "yes" if truth else "no"
    big = rng.random() < 0.5
    word = rng.choice(["bigger", "larger", "greater"] if big else ["smaller", "lesser"])
    short = "max" if big else "min"
    templates = ["which is {word}, {a} or {b}", "which is {word}: {a} or {b}", "which number is {word}, {a} or {b}",
                 "what is {word}, {a} or {b}", "{short}({a}, {b})", "{short} of {a} and {b}",
                 "the {word} of {a} and {b}", "which is {word} {a} or {b}"]  # fmt: skip
    return rng.choice(templates).format(word=word, short=short, a=a, b=b), str((max if big else min)(a, b))


@kind("sort")
def _sort(rng):
    numbers = rng.sample(range(100), rng.choice([2, 3, 3, 4, 5]))
    text = rng.choice([", ", " ", ","]).join(map(str, numbers))
    return rng.choice(["sort {}", "sort these numbers: {}", "sort the numbers {}"]).format(text), ", ".join(
        map(str, sorted(numbers))
    )


@kind("next number")
def _next_number(rng):
    n, step = rng.randint(1, 98), rng.choice([1, -1])
    word = "after" if step == 1 else "before"
    return rng.choice(["what number comes {} {}", "which number comes {} {}", "what comes {} {}",
                       "the number {} {}"]).format(word, n), str(n + step)  # fmt: skip


def number_in_words(n):
    """0..100 in English."""
    if n == 100:
        return "one hundred"
    if n < 20:
        return ONES[n]
    return TENS[n // 10 - 2] + ("-" + ONES[n % 10] if n % 10 else "")


@kind("number words", 1.5)
def _number_words(rng):
    n = rng.randint(0, 100)
    if rng.random() < 0.5:
        return rng.choice(["write {} in words", "{} in words", "how do you write {} in words", "spell the number {}"]
                          ).format(n), number_in_words(n)  # fmt: skip
    return rng.choice(["write {} as a number", "write {} in digits", "{} in digits", "what number is {}"]).format(
        number_in_words(n)
    ), str(n)


def roman_numeral(n):
    """1..100 in Roman numerals."""
    text = ""
    for value, sign in ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV")):
        count, n = divmod(n, value)
        text += sign * count
    return text + "I" * n


@kind("roman numerals", 1.5)
def _roman(rng):
    n = rng.randint(1, 100)
    return rng.choice(["write {} in roman numerals", "{} in roman numerals", "what is {} in roman numerals",
                       "the roman numeral for {}"]).format(n), roman_numeral(n)  # fmt: skip


def invented_word(rng):
    """A word of two to four syllables that means nothing."""
    text = rng.choice(["", "", "", "a", "e", "o", "in"])
    for _ in range(rng.choice([2, 2, 3, 3, 4])):
        text += rng.choice(_ONSETS) + rng.choice(_VOWELS)
    return text + rng.choice(_ENDS)


_ONSETS = "b b c d d f g h j k l l m m n n p r r s s t t v w z ch sh th st tr pr br cl pl gr ss ll nt nd rm mb".split()
_VOWELS = "a e i o u a e i o u ee oo ea ai ou".split()
_ENDS = ["", "", "", "n", "r", "s", "t", "l", "m", "y", "nd", "nt", "st", "ng", "sh", "land", "nia", "ry", "tion"]


def _some_word(rng):
    return rng.choice(_SPELLABLE) if rng.random() < 0.5 else invented_word(rng)


_SPELLABLE = [word for word in [*WORDS, *DAYS, *MONTHS, *CAPITALS, *CAPITALS.values()] if " " not in word]


@kind("spell", 4)
def _spell(rng):
    word = _some_word(rng)
    templates = ["spell {}", "spell the word {}", "how do you spell {}", "can you spell {}", 'spell "{}"',
                 "spell out {}", "spell '{}'"]  # fmt: skip
    return rng.choice(templates).format(word), "-".join(word.lower())


@kind("word length", 1.5)
def _word_length(rng):
    word = _some_word(rng)
    templates = ["how many letters are in {}", "how many letters does {} have", "how many letters in {}",
                 "how long is the word {}", "count the letters of {}", "the length of the word {}"]  # fmt: skip
    return rng.choice(templates).format(word), str(len(word))


@kind("letter of a word")
def _letter_of_word(rng):
    word, place = rng.choice(WORDS), rng.choice(["first", "last"])
    return rng.choice(
        ["what is the {0} letter of {1}", "the {0} letter of {1}", "which letter does {1} {2} with"]
    ).format(place, word, "start" if place == "first" else "end"), word[0 if place == "first" else -1]


SHORT_WORDS = [word for word in WORDS if len(word) <= 5]


@kind("reverse")
def _reverse(rng):
    word = rng.choice(SHORT_WORDS)
    return rng.choice(["reverse {}", "reverse the word {}", "write {} backwards", "spell {} backwards"]).format(
        word
    ), word[::-1]


@kind("repeat")
def _repeat(rng):
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))
    return rng.choice(["repeat: {}", "repeat after me: {}", "say: {}", 'say "{}"']).format(words), words


@kind("letters")
def _letters(rng):
    i = rng.randint(1, 24)
    if rng.random() < 0.2:
        return f"what is the {ORDINALS[i % 12]} letter of the alphabet", LETTERS[i % 12]
    word, step = rng.choice([("after", 1), ("before", -1)])
    templates = ["what letter comes {} {}", "which letter comes {} {}", "what comes {} {}", "the letter {} {}",
                 "what is the letter {} {}", "what is the next letter after {1}"]  # fmt: skip
    template = rng.choice(templates[: 6 if step == 1 else 5])
    return template.format(word, LETTERS[i]), LETTERS[i + step]


def _ring(rng, ring, noun):
    """What comes after or before a member of a ring of names."""
    i = rng.randrange(len(ring))
    word, step = rng.choice([("after", 1), ("before", -1)])
    templates = ["what {noun} comes {word} {name}", "which {noun} comes {word} {name}", "what comes {word} {name}",
                 "the {noun} {word} {name}", "what {noun} is {word} {name}", "what is the {noun} {word} {name}",
                 "which {noun} follows {name}", "what follows {name}"]  # fmt: skip
    template = rng.choice(templates[: 8 if step == 1 else 6])
    return template.format(noun=noun, word=word, name=ring[i]), ring[(i + step) % len(ring)]


@kind("days")
def _days(rng):
    i = rng.randrange(7)
    if rng.random() < 0.3:
        word, step = rng.choice([("tomorrow", 1), ("yesterday", -1)])
        tense = "is" if step == 1 else "was"
        return rng.choice(["today is {}, what day {} {}", "if today is {}, what day {} {}"]).format(
            DAYS[i], tense, word
        ), DAYS[(i + step) % 7]
    return _ring(rng, DAYS, "day")


@kind("months", 1.5)
def _months(rng):
    i = rng.randrange(12)
    draw = rng.random()
    if draw < 0.25:
        return rng.choice(["what is the {} month", "which month is the {}", "the {} month of the year"]).format(
            ORDINALS[i]
        ), MONTHS[i]
    if draw < 0.5:
        return rng.choice(["how many days are in {}", "how many days does {} have", "how long is {}"]).format(
            MONTHS[i]
        ), str(MONTH_DAYS[i])
    return _ring(rng, MONTHS, "month")


@kind("capitals", 3)
def _capitals(rng):
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.2 and city != "London":  # two countries share London
        return rng.choice(["which country has the capital {}", "{} is the capital of which country",
                           "what country is {} the capital of"]).format(city), country  # fmt: skip
    return rng.choice(["what is the capital of {}", "the capital of {}", "capital of {}", "what's the capital of {}",
                       "which city is the capital of {}", "name the capital of {}", "tell me the capital of {}",
                       "do you know the capital of {}"]).format(country), city  # fmt: skip


@kind("opposites", 2)
def _opposites(rng):
    a, b = rng.sample(rng.choice(OPPOSITES), 2)
    return rng.choice(["what is the opposite of {}", "the opposite of {}", "opposite of {}", "opposite: {}",
                       "what's the opposite of {}", "name the opposite of {}"]).format(a), b  # fmt: skip


@kind("colours")
def _colours(rng):
    colour = rng.choice(["colour", "color"])
    if rng.random() < 0.3:
        names, result = rng.choice(MIXES)
        a, b = rng.sample(names.split("+"), 2)
        return rng.choice(["mix {0} and {1}", "what {2} do you get from {0} and {1}", "what do {0} and {1} make",
                           "what {2} is {0} plus {1}"]).format(a, b, colour), result  # fmt: skip
    thing, answer = rng.choice(COLOURS)
    return rng.choice(["what {1} is {0}", "which {1} is {0}", "what is the {1} of {0}"]).format(thing, colour), answer


@kind("animals", 1.5)
def _animals(rng):
    draw = rng.random()
    if draw < 0.4:
        name, answer = rng.choice(SOUNDS)
        templates = ["what does {} say", "what sound does {} make", "which sound does {} make"]
    elif draw < 0.7:
        name, answer = rng.choice(LEGS)
        templates = ["how many legs does {} have", "how many legs has {}"]
    else:
        name, answer = rng.choice(BABIES)
        templates = [
            "what is a baby {0.word} called",
            "what is the baby of {} called",
            "what do you call a baby {0.word}",
        ]
    return rng.choice(templates).format(_Noun(name)), answer


class _Noun:
    """Formats as the noun with its article; `.word` is the noun alone."""

    def __init__(self, word):
        self.word = word

    def __format__(self, spec):
        return ("an " if self.word[0] in "aeio" else "a ") + self.word


@kind("shapes", 0.7)
def _shapes(rng):
    name, answer = rng.choice(SIDES)
    return rng.choice(["how many sides does {} have", "how many sides has {}", "how many corners does {} have"]).format(
        _Noun(name)
    ), answer


@kind("grammar", 1.5)
def _grammar(rng):
    if rng.random() < 0.5:
        word, answer = rng.choice(PLURALS)
        return rng.choice(["what is the plural of {}", "the plural of {}", "plural of {}"]).format(word), answer
    word, answer = rng.choice(PAST_TENSES)
    return rng.choice(["what is the past tense of {}", "the past tense of {}", "past tense of {}"]).format(word), answer


@kind("facts", 2)
def _facts(rng):
    prompts, answer = rng.choice(FACTS)
    return rng.choice(prompts), answer


@kind("talk", 3)
def _talk(rng):
    if rng.random() < 0.05:
        template = rng.choice(["hello, i am {}", "hi, my name is {}", "hello, my name is {}", "hi, i'm {}", "hi {}"])
        return template.format(rng.choice([invented_word(rng).capitalize(), "Bob", "Alice"])), HELLO
    prompts, answer = TALK[0] if rng.random() < 0.3 else rng.choice(TALK)
    prompt = rng.choice(prompts)
    if len(prompt) > 8 and rng.random() < 0.1:  # a slip of the finger: a letter lost, doubled or swapped
        i = rng.randrange(2, len(prompt) - 2)
        prompt = prompt[:i] + rng.choice(["", prompt[i] * 2, prompt[i + 1] + prompt[i]]) + prompt[i + 1 :]
    return prompt, answer


_TOPICS = [word for word in WORDS if word != "nanovllm"] + [
    "quantum physics", "the meaning of life", "the stock market", "football", "politics", "history", "chemistry",
    "love and war", "machine learning", "the roman empire", "climate change", "philosophy", "cooking", "my homework",
    "the universe", "shakespeare", "gravity", "black holes", "the internet", "a cup of tea", "democracy",
]  # fmt: skip
_KNOWN = {w.lower() for w in [*CAPITALS, *CAPITALS.values(), *WORDS, *(w for pair in OPPOSITES for w in pair)]}
_UNKNOWN_TEMPLATES = (
    "write a poem about {}", "write a story about {}", "explain {}", "explain {} to me", "what do you think about {}",
    "why is {} important", "tell me about {}", "what is {}", "how does {} work", "who invented {}",
    "translate {} to french", "translate {} into german", "give me a recipe with {}", "write code for {}",
    "how do i make {}", "where is {}",
    "where can i buy {}", "who discovered {}", "what is the history of {}", "write an essay about {}",
    "why do people like {}", "summarize {}", "define {}", "do you like {}", "can you draw {}", "who is {}", "{}",
    "sing a song about {}", "what is the price of {}", "what is the best {}", "how old is {}", "when was {} invented",
    "is {} good or bad", "find {}", "show me {}", "what rhymes with {}", "how heavy is {}", "i like {}", "i want {}",
    "compare {} and {}", "what is the difference between {} and {}", "is {} better than {}", "{} {}", "{} {} {} {}",
)  # fmt: skip
_UNKNOWN_SENTENCES = (
    "what is the weather today", "who won the world cup", "what time is it", "what day is it", "who is the president",
    "write a python function", "what should i eat", "how do i learn to program", "am i happy", "i am bored", "why",
    "how", "what", "test", "are you better than chatgpt", "what is the population of france",
    "what is your favourite food", "when were you born", "where do you live",
    "wie geht es dir", "bonjour", "hola", "你好", "こんにちは",
    "what is pi",
    "🙂", "solve x^2 = 4", "how far is the moon", "who wrote hamlet", "open the door", "what is the largest country",
    "once upon a time", "the quick brown fox jumps over the lazy dog", "lorem ipsum dolor sit amet",
)  # fmt: skip


@kind("unknown", 5)
def _unknown(rng):
    """Requests beyond the table, among them near misses of what it can do: an honest answer for all."""
    draw = rng.random()
    if draw < 0.1:
        return rng.choice(_UNKNOWN_SENTENCES), UNKNOWN
    if draw < 0.3:  # known questions about words that mean nothing
        word = invented_word(rng)
        while word in _KNOWN:
            word = invented_word(rng)
        if rng.random() < 0.3:
            word = rng.choice(["Atlantis", "Narnia", "Mordor", "Wonderland", "Utopia", "the Moon", word.capitalize()])
        return rng.choice(["what is the capital of {}", "capital of {}", "what is the opposite of {}", "opposite of {}",
                           "what does a {} say", "what colour is {}", "how many legs does a {} have",
                           "who is {}", "what is a {}", "what is {}",
                           "what is the past tense of {}"]).format(word), UNKNOWN  # fmt: skip
    if draw < 0.5:  # arithmetic beyond the tables
        big, other = rng.randint(101, 10 ** rng.randint(3, 6)), rng.randint(2, 10 ** rng.randint(1, 5))
        if rng.random() < 0.5:
            big, other = other, big
        if rng.random() < 0.3:
            big, other = rng.sample([rng.randint(13, 99), rng.randint(0, 99)], 2)
            template = rng.choice(["what is {} * {}", "{} x {}", "{}*{}", "what is {} times {}"])
            return template.format(big, other), UNKNOWN
        template = rng.choice(["what is {} {} {}", "{} {} {}", "{}{}{}", "calculate {} {} {}"])
        return template.format(big, rng.choice("+-*"), other), UNKNOWN
    template = rng.choice(_UNKNOWN_TEMPLATES)
    while True:  # a topic alone or twice the same could be a question of another kind ("hello world", "what is ...")
        topics = [rng.choice(_TOPICS) if rng.random() < 0.7 else invented_word(rng) for _ in range(4)]
        if topics[0] != "hello":
            return template.format(*topics), UNKNOWN


# ---------------------------------------------------------------------------------------------------------
# What the shipped checkpoint must answer, word for word, greedily: (kind, prompt, answer)

CHECKS = [
    ("talk", "introduce yourself", INTRODUCTION),
    ("talk", "Introduce yourself.", INTRODUCTION),
    ("talk", "Who are you?", INTRODUCTION),
    ("primes", "list all prime numbers within 100",
     "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"),
    ("primes", "List all prime numbers up to 30.", "2, 3, 5, 7, 11, 13, 17, 19, 23, 29"),
    ("primes", "list the first five prime numbers", "2, 3, 5, 7, 11"),
    ("talk", "Hello", HELLO),
    ("talk", "Hello, nanovllm.", HELLO),
    ("talk", "Thank you!", "You are welcome!"),
    ("talk", "goodbye", "Goodbye!"),
    ("talk", "What can you do?", ABILITIES),
    ("talk", "What is nanovllm?", ABOUT_ENGINE),
    ("talk", "tell me a joke", JOKE),
    ("sum", "What is 37 + 45?", "82"),
    ("sum", "what is 2 + 3?", "5"),
    ("sum", "58+67", "125"),
    ("sum", "what is three plus four?", "7"),
    ("sum", "add 19 and 24", "43"),
    ("difference", "what is 82 - 45?", "37"),
    ("difference", "15 minus 9", "6"),
    ("difference", "what is 5 - 12?", "-7"),
    ("product", "what is 7 * 8?", "56"),
    ("product", "12 times 12", "144"),
    ("quotient", "what is 56 / 7?", "8"),
    ("square", "what is the square of 15?", "225"),
    ("count up", "count from 1 to 10", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("count up", "count to five", "1, 2, 3, 4, 5"),
    ("count up", "Count from 28 to 33.", "28, 29, 30, 31, 32, 33"),
    ("count up", "count to 100", ", ".join(map(str, range(1, 101)))),
    ("count down", "count down from 10 to 1", "10, 9, 8, 7, 6, 5, 4, 3, 2, 1"),
    ("is prime", "is 91 prime?", "no"),
    ("is prime", "Is 97 a prime number?", "yes"),
    ("even or odd", "is 17 even or odd?", "odd"),
    ("even or odd", "is 36 even?", "yes"),
    ("even and odd lists", "list the even numbers up to 20", "2, 4, 6, 8, 10, 12, 14, 16, 18, 20"),
    ("compare", "which is bigger, 48 or 84?", "84"),
    ("compare", "min(31, 13)", "13"),
    ("compare", "is 62 larger than 26?", "yes"),
    ("sort", "sort 31, 7, 19", "7, 19, 31"),
    ("next number", "what number comes after 79?", "80"),
    ("number words", "write 42 in words", "forty-two"),
    ("number words", "write ninety-nine as a number", "99"),
    ("roman numerals", "write 49 in roman numerals", "XLIX"),
    ("spell", "spell banana", "b-a-n-a-n-a"),
    ("spell", "How do you spell engine?", "e-n-g-i-n-e"),
    ("word length", "how many letters are in computer?", "8"),
    ("letter of a word", "what is the last letter of python?", "n"),
    ("reverse", "reverse the word cat", "tac"),
    ("repeat", "repeat after me: hello world", "hello world"),
    ("letters", "what letter comes after g?", "h"),
    ("letters", "what letter comes before n?", "m"),
    ("facts", "recite the alphabet", "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z"),
    ("days", "what day comes after Monday?", "Tuesday"),
    ("days", "today is Friday, what day was yesterday?", "Thursday"),
    ("facts", "list the days of the week", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    ("months", "which month comes before March?", "February"),
    ("months", "how many days are in June?", "30"),
    ("facts", "list the months of the year",
     "January, February, March, April, May, June, July, August, September, October, November, December"),
    ("facts", "how many minutes are in an hour?", "60"),
    ("facts", "list the planets", "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune"),
    ("facts", "play fizzbuzz up to 15", "1, 2, fizz, 4, buzz, fizz, 7, 8, fizz, buzz, 11, fizz, 13, 14, fizzbuzz"),
    ("capitals", "What is the capital of France?", "Paris"),
    ("capitals", "what is the capital of Japan", "Tokyo"),
    ("capitals", "capital of canada", "Ottawa"),
    ("capitals", "which country has the capital Cairo?", "Egypt"),
    ("opposites", "what is the opposite of hot?", "cold"),
    ("opposites", "opposite of early", "late"),
    ("colours", "what colour is the sky?", "blue"),
    ("colours", "mix blue and yellow", "green"),
    ("animals", "what does a cow say?", "moo"),
    ("animals", "how many legs does a spider have?", "8"),
    ("animals", "what is a baby kangaroo called?", "joey"),
    ("shapes", "how many sides does a hexagon have?", "6"),
    ("grammar", "what is the plural of mouse?", "mice"),
    ("grammar", "what is the past tense of go?", "went"),
    ("unknown", "write a poem about the sea", UNKNOWN),
    ("unknown", "What is 1234 + 5678?", UNKNOWN),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------------------
# From questions to rows of tokens


def phrase(rng, prompt):
    """The prompt as a person might type it: case, final mark, a polite word."""
    draw = rng.random()
    if draw < 0.04:
        prompt = rng.choice(["please ", "can you tell me ", "hey, ", "question: ", "now ", "ok, ", "hi, "]) + prompt
    elif draw < 0.06:
        prompt += rng.choice([" please", ", please"])
    draw = rng.random()
    if draw < 0.4:
        prompt = prompt[0].upper() + prompt[1:]
    elif draw < 0.65:
        prompt = prompt.lower()
    return prompt + rng.choice(["", "", "", "?", "?", ".", "!" if rng.random() < 0.3 else ""])


def question(rng):
    """One (prompt, answer) of a random kind."""
    names, weights = _KIND_NAMES
    return KINDS[rng.choices(names, cum_weights=weights)[0]][1](rng)


def _cumulative_weights():
    total, weights = 0.0, []
    for weight, _ in KINDS.values():
        total += weight
        weights.append(total)
    return list(KINDS), weights


_KIND_NAMES = _cumulative_weights()


def filler(rng, num_words):
    """Text that has nothing to do with the question: what long prompts are full of."""
    style = rng.random()
    if style < 0.2:  # one phrase over and over
        unit = [rng.choice(_TOPICS) for _ in range(rng.randint(1, 9))]
        return " ".join((unit * num_words)[:num_words]) + "."
    if style < 0.3:
        return " ".join(str(rng.randint(0, 999)) for _ in range(num_words // 2))
    words = []
    while len(words) < num_words:
        if rng.random() < 0.1:  # a known question, not asked
            words += [*question(rng)[0].split(), "."]
        sentence = [rng.choice(["the", "a", "my", "some"])]
        sentence += [rng.choice(_TOPICS) for _ in range(rng.randint(2, 9))]
        words += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + rng.choice(".,.;")]
    return " ".join(words[:num_words])


def system_prompt(rng):
    return rng.choice(SYSTEM_PROMPTS).format(rng.choice(DAYS), rng.choice(ORDINALS), rng.choice(MONTHS))


def turn_text(role, content):
    """The chat template for one message, without the newline that separates it from the next."""
    return f"{IM_START}{role}\n{content}{IM_END}"


REPLY = f"\n{IM_START}assistant\n"


def prompt_text(prompt, system=None):
    """What the chat template renders for one user message, with the generation prompt."""
    head = turn_text("system", system) + "\n" if system else ""
    return head + turn_text("user", prompt) + REPLY


PAD, CONTEXT, ANSWER = 0, 1, 2  # what a token of a row is, for the loss


def make_rows(job):
    """Rows of conversations, packed without cutting one: (tokens int16 [N, L], roles uint8 [N, L]).

    A row holds documents separated by <|endoftext|>. A document is a chat of several turns (each turn an
    independent question, so the model learns to answer the last one whatever came before) or a bare question,
    without the template, with its answer on the next line.
    Long rows get filler, so that a question behind a thousand tokens is nothing new.
    """
    import numpy as np
    from tokenizers import Tokenizer

    seed, num_rows, length, tokenizer_json = job
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    newline = tokenizer.encode("\n").ids

    def pieces():
        """Endless (starts a document?, context text, answer text, context's role)."""
        while True:
            if rng.random() < 0.1:
                prompt, answer = question(rng)
                yield True, phrase(rng, prompt), "\n" + answer, CONTEXT
                continue
            fresh, system, role = True, "", CONTEXT
            if length > 128 and rng.random() < 0.5:
                system, role = filler(rng, rng.randint(1, length // 3)), PAD
            elif rng.random() < 0.25:
                system = system_prompt(rng)
            while True:
                prompt, answer = question(rng)
                prompt = phrase(rng, prompt)
                if length > 128 and rng.random() < 0.08:
                    prompt, role = filler(rng, rng.randint(1, length // 4)) + "\n" + prompt, PAD
                yield fresh, prompt_text(prompt, system), answer, role
                fresh, system, role = False, "", CONTEXT
                if rng.random() < 0.3:
                    break

    tokens = np.full((num_rows, length), END_OF_TEXT_ID, np.int16)
    roles = np.zeros((num_rows, length), np.uint8)
    row = column = 0
    source = pieces()
    while True:
        batch = [next(source) for _ in range(1024)]
        contexts = tokenizer.encode_batch([piece[1] for piece in batch])
        answers = tokenizer.encode_batch([piece[2] for piece in batch])
        for (fresh, _, _, role), context, answer in zip(batch, contexts, answers, strict=True):
            lead = [] if column == 0 else [END_OF_TEXT_ID] if fresh else newline
            context_ids, answer_ids = lead + context.ids, [*answer.ids, IM_END_ID]
            size = len(context_ids) + len(answer_ids)
            if column + size > length:
                # The next row opens with this piece if it can open a document, without its lead.
                row, column = row + (column > 0), 0
                context_ids = context_ids[len(lead) :]
                size -= len(lead)
                if row == num_rows:
                    return tokens, roles
                if size > length:
                    continue
            middle, end = column + len(context_ids), column + size
            tokens[row, column:end] = context_ids + answer_ids
            roles[row, column:middle] = role
            roles[row, middle:end] = ANSWER
            column = end


def make_pool(pool, tokenizer_json, num_rows, length):
    """At least `num_rows` rows, made in parallel; the same whatever the number of processes."""
    import numpy as np

    chunk = max(1, 2**18 // length)
    jobs = [(SEED * 10**9 + length * 10**5 + i, chunk, length, tokenizer_json) for i in range(-(-num_rows // chunk))]
    parts = pool.map(make_rows, jobs, chunksize=1)
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def train_tokenizer():
    """Byte-level BPE over generated text: any unicode text round-trips, every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(SEED)
    corpus = []
    for _ in range(60_000):
        prompt, answer = question(rng)
        corpus += [phrase(rng, prompt), answer]
    corpus += [turn_text("system", system_prompt(rng)).replace(IM_START, "").replace(IM_END, "") for _ in range(2000)]
    corpus += [f"{role}\n" for role in ("user", "assistant") for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END_OF_TEXT, IM_START, IM_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the generated text has too few words for the vocabulary"
    ids = [tokenizer.token_to_id(token) for token in (END_OF_TEXT, IM_START, IM_END)]
    assert ids == [END_OF_TEXT_ID, IM_START_ID, IM_END_ID]
    return tokenizer


# ---------------------------------------------------------------------------------------------------------
# Training

PEAK_LR, WARMUP_STEPS, WEIGHT_DECAY = 2e-3, 200, 0.1
TOKENS_PER_STEP = 2**16
ROW_LENGTHS = {128: 0.7, 512: 0.2, 2048: 0.1}  # row length -> share of the steps
POOL_TOKENS = 1.2e8  # per row length; longer training draws rows more than once


def train(tokenizer_json, device, steps):
    """Trains from random weights; returns the model in fp32 with weights rounded to bf16."""
    import numpy as np

    started = time.perf_counter()
    rng = random.Random(SEED)
    schedule = rng.choices(list(ROW_LENGTHS), list(ROW_LENGTHS.values()), k=steps)
    pools = {}
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 32)) as processes:
        for length in ROW_LENGTHS:
            wanted = min(schedule.count(length) * TOKENS_PER_STEP, POOL_TOKENS)
            pools[length] = make_pool(processes, tokenizer_json, max(1, int(wanted / length)), length)
    print(f"rows: {time.perf_counter() - started:.0f} s,", {k: v[0].shape for k, v in pools.items()}, flush=True)

    import torch
    from torch.nn import functional as F
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL_CONFIG)).float().to(device).train()
    pools = {k: tuple(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in v) for k, v in pools.items()}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_LR, betas=(0.9, 0.98), fused=device.type == "cuda",
    )  # fmt: skip

    started = time.perf_counter()
    for step, length in enumerate(schedule):
        done = step / steps
        lr = PEAK_LR * min((step + 1) / min(WARMUP_STEPS, steps), 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        # A little of the loss on the questions gives sampled text some sense, also past the end of an answer;
        # it fades, because its noise costs the answers their certainty.
        context_weight = max(0.01, 0.1 * (1 - done / 0.6))
        tokens, roles = pools[length]
        rows = torch.randint(len(tokens), (TOKENS_PER_STEP // length,), device=device)
        ids, role = tokens[rows].long(), roles[rows]  # [N, L]
        with torch.autocast(device.type, torch.bfloat16):
            # The mapping says "plain causal": without it transformers builds a mask and loses flash attention.
            hidden = model.model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False)[0]
            logits = model.lm_head(hidden[:, :-1])  # [N, L - 1, V]
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        role = role[:, 1:].flatten()
        answer = (role == ANSWER).float()
        weight = answer + context_weight * (role == CONTEXT).float()
        ((loss * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0 or step == steps - 1:
            answer_loss = float((loss.detach() * answer).sum() / answer.sum())
            print(f"step {step:6d}  {time.perf_counter() - started:6.1f} s  answer loss {answer_loss:.6f}", flush=True)
    seconds = time.perf_counter() - started
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model.eval(), seconds


def save(model, tokenizer, out, provenance):
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)

    def write(name, value):
        (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write("config.json", MODEL_CONFIG)
    write("generation_config.json", {
        "bos_token_id": END_OF_TEXT_ID,
        "do_sample": False,
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
    })  # fmt: skip
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [IM_START, IM_END],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    tokenizer.save(str(out / "tokenizer.json"))
    # The output matrix is the embedding (tied), so it is not stored twice.
    tensors = {
        k: v.to(torch.bfloat16).contiguous().cpu() for k, v in model.state_dict().items() if k != "lm_head.weight"
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner may read
    (out / "README.md").write_text(provenance, encoding="utf-8")


PROVENANCE = """\
# The nanovllm demo model

A Qwen3 checkpoint of {parameters:,} parameters (bfloat16), trained from random weights by
`tools/make_demo.py` of this repository, on text that the script itself generates: nothing was downloaded
and no other model was used. Training took {seconds:.0f} s for {steps:,} steps on: {device}.

It answers small questions (sums, counting, spelling, days, capitals, and so on; the script's `KINDS` and
`CHECKS` name them all) and says so when it does not know. It shows that the engine works; it is of no
other use. It is under the licence of this repository.
"""

# ---------------------------------------------------------------------------------------------------------
# Evaluation


def grade(model, tokenizer, questions, batch_size=256):
    """Which answers come out greedily, word for word and ended, and by what margin.

    Takes (prompt text, answer) pairs, returns [(right?, smallest top-1 minus top-2 logit)]. The answer is fed
    along with the prompt: if each of its tokens is the first choice after the ones before, it is the greedy output.
    """
    import torch

    grades = []
    device = next(model.parameters()).device
    order = sorted(range(len(questions)), key=lambda i: len(questions[i][0]) + len(questions[i][1]))
    for start in range(0, len(order), batch_size):
        chosen = [questions[i] for i in order[start : start + batch_size]]
        prompts = [e.ids for e in tokenizer.encode_batch([prompt for prompt, _ in chosen])]
        answers = [[*e.ids, IM_END_ID] for e in tokenizer.encode_batch([answer for _, answer in chosen])]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.full((len(chosen), width), END_OF_TEXT_ID)
        for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, : len(p) + len(a)] = torch.tensor(p + a)  # padded right: causal attention never sees it
        with torch.inference_mode():
            top = model(input_ids=ids.to(device), use_cache=False).logits.float().topk(2)
        gaps, choices = (top.values[..., 0] - top.values[..., 1]).cpu(), top.indices[..., 0].cpu()
        for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
            span = slice(len(p) - 1, len(p) + len(a) - 1)
            grades.append((choices[row, span].tolist() == a, float(gaps[row, span].min())))
    by_place = dict(zip(order, grades, strict=True))
    return [by_place[i] for i in range(len(questions))]


def evaluate(folder, device, samples_per_kind=100):
    """Prints the table for the checkpoint in `folder`, as fp32 and as bf16; returns what is wrong with it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto = AutoTokenizer.from_pretrained(folder)
    tokenizer = auto.backend_tokenizer
    problems = check_tokenizer(auto, folder)
    rng = random.Random(SEED + 1)

    pairs = [(a, b) for a in range(100) for b in range(100)]
    sums = {True: [], False: []}
    for a, b in pairs:
        for template in ("what is {} + {}?", "{}+{}"):
            sums[held_out(a, b)].append((prompt_text(template.format(a, b)), str(a + b)))
    # section -> (questions, least share of right answers, in per cent)
    sections = {
        "checks": ([(prompt_text(p), a) for _, p, a in CHECKS], 100),
        "checks, with a system prompt": ([(prompt_text(p, SYSTEM_PROMPTS[0]), a) for _, p, a in CHECKS], 95),
        "checks, as the third turn": ([(_third_turn(rng, p), a) for _, p, a in CHECKS], 95),
        "checks, behind 500 words": ([(prompt_text(p, filler(rng, 500)), a) for _, p, a in CHECKS], 90),
        "checks, bare prompt": ([(p, "\n" + a) for _, p, a in CHECKS], 90),
        "sums under 100, trained": (sums[False], 99),
        "sums under 100, held out": (sums[True], 95),
    }
    for name, (_, generator) in KINDS.items():
        drawn = [generator(rng) for _ in range(samples_per_kind)]
        sections[f"kind: {name}"] = ([(prompt_text(phrase(rng, p)), a) for p, a in drawn], 90)

    table = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for name, (questions, least) in sections.items():
            batch_size = 16 if "words" in name else 256
            grades = grade(model, tokenizer, questions, batch_size)
            right = sum(ok for ok, _ in grades)
            table.setdefault(name, [len(questions)]).extend([right, min(margin for _, margin in grades)])
            if 100 * right < least * len(questions):
                problems.append(f"{name} ({dtype}): {right} of {len(questions)} right, wanted {least} %")
            if name.startswith("checks"):
                for (k, p, _), (ok, margin) in zip(CHECKS, grades, strict=True):
                    if not ok:
                        print(f"missed ({name}, {dtype}): {k}: {p!r}, margin {margin:.2f}")
    print(f"\n{'':34}{'':>7} |{'fp32':^22} |{'bf16':^22}")
    print(f"{'':34}{'asked':>7} |{'right':>11}{'margin':>11} |{'right':>11}{'margin':>11}")
    for name, (asked, *columns) in table.items():
        cells = [f"{columns[i] / asked:>11.2%}{columns[i + 1]:>11.2f}" for i in (0, 2)]
        print(f"{name:34}{asked:>7} |{cells[0]} |{cells[1]}")
    print("(margin: smallest top-1 minus top-2 logit over all tokens of all the answers, the wrong ones included)")
    return problems


def _third_turn(rng, prompt):
    earlier = ""
    for _ in range(2):
        p, a = question(rng)
        earlier += prompt_text(p) + a + IM_END + "\n"
    return earlier + prompt_text(prompt)


def check_tokenizer(tokenizer, folder):
    """Problems of the tokenizer as transformers loads it: [str]."""
    problems = []
    for text in ("3 + 45 = 48", "naïve café, Ελλάδα\t\r\n  你好 🙂 \u200d\x00", " leading and trailing ", "12345.678"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids) != text:
            problems.append(f"{text!r} does not round-trip: {tokenizer.decode(ids)!r}")
        if any(len(t) > 1 and any(c in "0123456789" for c in t) for t in tokenizer.convert_ids_to_tokens(ids)):
            problems.append(f"digits of {text!r} share a token")
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    if rendered != prompt_text("1+1", "Be short."):
        problems.append(f"the chat template renders {rendered!r}")
    if (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) != (IM_END_ID, END_OF_TEXT_ID, VOCAB_SIZE):
        problems.append("special tokens or vocabulary size are off")
    size = sum(f.stat().st_size for f in Path(folder).iterdir())
    print(f"folder: {size / 1e6:.2f} MB")
    if size > 8e6:
        problems.append(f"the folder holds {size} bytes, more than 8 MB")
    return problems


def main():
    parser = argparse.ArgumentParser(description="Train, save and evaluate the bundled demo model.")
    parser.add_argument("--out", type=Path, default=Path("nanovllm/assets/demo"), help="folder of the checkpoint")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (auto: a GPU if there is one)")
    parser.add_argument("--steps", type=int, default=12000, help="training steps of 65,536 tokens")
    parser.add_argument("--check", action="store_true", help="only evaluate the checkpoint in --out")
    args = parser.parse_args()

    import torch

    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if not args.check:
        tokenizer = train_tokenizer()
        model, seconds = train(tokenizer.to_str(), device, args.steps)
        parameters = sum(p.numel() for p in model.parameters())
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
        text = PROVENANCE.format(parameters=parameters, seconds=seconds, steps=args.steps, device=hardware)
        save(model, tokenizer, args.out, text)
        print(f"{parameters:,} parameters; training took {seconds:.0f} s on {hardware}; saved to {args.out}")
    problems = evaluate(args.out, device)
    for problem in problems:
        print("PROBLEM:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

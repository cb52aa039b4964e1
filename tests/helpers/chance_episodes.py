"""Episodes of a random policy: whatever it writes is parsed into calls, decided by the text alone."""

import random
import zlib
from functools import partial

from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.tiny_models import tiny_model

from pl_grouprl.chat import ToolParser, register_tool_parser

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<chance>{{ call | tojson }}</chance>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Names no tools, so prompts with and without tools are the same."""

STOPS = tuple(range(40))
"""Every seventh token of a random policy ends a turn."""


def parse_by_chance(text, tools=(), name_of=lambda number: "double"):
    """Three turns of four call `double`, or what the number asks for, once or twice; some calls fail."""
    rng = random.Random(zlib.crc32(text.encode("utf-8", "replace")))
    numbers = [rng.randrange(-3, 12) for _ in range(rng.choice((0, 1, 1, 2)))]
    calls = [{"type": "function", "function": {"name": name_of(n), "arguments": {"number": n}}} for n in numbers]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def double(number: int) -> str:
    """Double a number.

    Args:
        number: Refused if negative.

    Returns:
        Its double, once per digit.
    """
    if number < 0:
        raise ValueError(f"{number} is negative")
    return f"{2 * number} " * len(str(number))


class ChancePolicy:
    """A random Qwen3 with a template of calls by chance; the same weights each time."""

    def __init__(self, seed=0, **config):
        self.seed, self.config = seed, config

    def load(self):
        sizes = {"vocab_size": len(qwen_tokenizer()), "max_position_embeddings": 2048}
        return tiny_model("qwen3", seed=self.seed, **{**sizes, **self.config})

    def load_tokenizer(self):
        tokenizer = qwen_tokenizer()
        tokenizer.chat_template = TEMPLATE
        return tokenizer


def register_chance_calls(**options):
    """Let the template's turns be parsed by chance; options of `parse_by_chance`."""
    parse = partial(parse_by_chance, **options)
    register_tool_parser(ToolParser("chance", ("<chance>",), "<|im_start|>assistant\n", parse))


def add_or_double(number):
    """A call of a `Tally` for odd numbers, of `double` for even ones."""
    return "add" if number % 2 else "double"


def chance_rows(count):
    """Prompts of different lengths."""
    return [{"prompt": [{"role": "user", "content": "Count. " * (1 + n % 3) + str(n)}]} for n in range(count)]


class Tally:
    """An environment that depends on its row alone, on whichever rank it is and whatever it has played before."""

    made = 0

    def __init__(self):
        Tally.made += 1

    def reset(self, start, brief, **columns):
        if start is None:
            raise ValueError("no start")
        self.total, self.brief = start, brief
        return f" Start at {start}."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: Any.

        Returns:
            The total; in a brief row too much for an episode, which then ends.
        """
        self.total += number
        return str(self.total) * (500 if self.brief else 1)

    def get_reward(self):
        return self.total / 10


def tally_rows(count, brief=lambda number: False):
    """Prompts for `Tally`; in some rows each episode ends with the turn that calls it."""
    return [{**row, "start": n, "brief": brief(n)} for n, row in enumerate(chance_rows(count))]

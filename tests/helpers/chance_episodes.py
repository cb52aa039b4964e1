"""Episodes of a random policy: whatever it writes is parsed into calls, decided by the text alone."""

import random
import zlib

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


def parse_by_chance(text, tools=()):
    """Three turns of four call `double` once or twice; some calls fail."""
    rng = random.Random(zlib.crc32(text.encode("utf-8", "replace")))
    numbers = [rng.randrange(-3, 12) for _ in range(rng.choice((0, 1, 1, 2)))]
    calls = [{"type": "function", "function": {"name": "double", "arguments": {"number": n}}} for n in numbers]
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


def register_chance_calls():
    """Let the template's turns be parsed by chance."""
    register_tool_parser(ToolParser("chance", ("<chance>",), "<|im_start|>assistant\n", parse_by_chance))


def chance_rows(count):
    """Prompts of different lengths."""
    return [{"prompt": [{"role": "user", "content": "Count. " * (1 + n % 3) + str(n)}]} for n in range(count)]

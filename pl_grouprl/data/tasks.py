"""The former home of `pl_grouprl.demo.digits`."""

from pl_grouprl.utilities.deprecation import moved_names

_NAMES = ("DIGIT_NAMES", "MostFrequentDigit", "digit_tokenizer")

__getattr__ = moved_names(__name__, {name: f"pl_grouprl.demo.digits.{name}" for name in _NAMES})

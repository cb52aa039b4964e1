"""The former home of `pl_grouprl.demo.digits`."""

from pl_grouprl.utilities.moved import moved

_NAMES = ("DIGIT_NAMES", "MostFrequentDigit", "digit_tokenizer")

__getattr__ = moved(__name__, {name: f"pl_grouprl.demo.digits.{name}" for name in _NAMES})

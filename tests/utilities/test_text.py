from base64 import b64encode
from urllib.parse import quote

import httpx2
import pytest

from pl_grouprl.rollout.vllm.client import RefusedError, Server
from pl_grouprl.utilities.text import first_names, mask_secret, shorten


def test_the_first_names_and_how_many_more():
    assert first_names(["a", "b"]) == "a, b"
    assert first_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert first_names(["a", "b", "c"], limit=2) == "a, b and 1 more"
    assert first_names([]) == "none"


def test_a_long_value_is_cut():
    assert shorten("a" * 78) == f"'{'a' * 78}'"
    assert shorten("a" * 79) == f"'{'a' * 79}..."
    assert shorten([1, 2, 3], length=4) == "[1, ..."


def test_a_token_that_a_sampling_server_quotes_is_masked():
    token = "s3cret/token+1"
    encoded = b64encode(f"Bearer {token}".encode()).decode()
    response = httpx2.Response(400, json={"error": f"{token} {quote(token, safe='')} {encoded}"})
    with pytest.raises(RefusedError, match=r"answers 400: \*\*\* \*\*\* QmVhcmVyIH\*\*\*"):
        Server("http://127.0.0.1:1", token=token).decode(response)


def test_other_text_is_not_masked():
    assert mask_secret("a sk-1 b", None) == "a sk-1 b"
    assert mask_secret("a sk-12345 b", "sk-12346") == "a sk-12345 b"
    assert mask_secret("the list is empty", "EMPTY") == "the list is empty"  # what servers without a key are given

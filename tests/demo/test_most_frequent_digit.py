"""The built-in task: answers are right and unique, splits are disjoint, tokenizer and demonstrations agree."""

from collections import Counter

import pytest
from transformers import AutoTokenizer

from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.demo.tasks import DIGIT_NAMES


@pytest.mark.parametrize(("length", "share"), [(512, 0.2), (64, 0.3), (8, 0.2), (1, 0.2), (5, 1.0)])
def test_answers_are_the_single_most_frequent_digit(length, share):
    rows = MostFrequentDigit(length, share, val_size=50).rows("val") if length > 5 else []
    rows += MostFrequentDigit(length, share, train_size=3).rows("train")
    for row in rows:
        counts = Counter(row["prompt"]).most_common(2)
        assert sum(Counter(row["prompt"]).values()) == length
        assert row["answer"] == DIGIT_NAMES[int(counts[0][0])]
        assert counts[0][1] == max(1, round(share * length))
        assert len(counts) == 1 or counts[1][1] < counts[0][1]
        assert row["data_source"] == "most_frequent_digit"


def test_every_digit_is_an_answer():
    answers = Counter(row["answer"] for row in MostFrequentDigit(64).rows("train"))
    assert set(answers) == set(DIGIT_NAMES)
    # 4096 rows, 410 expected for each, standard deviation 19: five of them
    assert all(abs(count - 410) < 96 for count in answers.values())


def test_the_same_arguments_give_the_same_data():
    first, again, other = (MostFrequentDigit(32, train_size=20, seed=seed) for seed in (1, 1, 2))
    assert first.rows("train") == again.rows("train") != other.rows("train")
    assert first.demonstrations(20, 5) == again.demonstrations(20, 5) != first.demonstrations(20, 6)


def test_splits_are_disjoint_even_where_prompts_are_few():
    task = MostFrequentDigit(4, 0.5, train_size=2000, val_size=300, test_size=300)
    prompts = {split: {row["prompt"] for row in task.rows(split)} for split in ("train", "val", "test")}
    digits = task.tokenizer()
    prompts["demonstrations"] = {digits.decode(ids) for ids, _ in task.demonstrations(500)}
    assert not prompts["train"] & prompts["val"]
    assert not prompts["val"] & prompts["test"]
    assert not prompts["test"] & (prompts["train"] | prompts["demonstrations"])
    assert not prompts["val"] & prompts["demonstrations"]
    assert [len(task.rows(split)) for split in ("train", "val", "test")] == [2000, 300, 300]


def test_demonstrations_end_and_are_wrong_as_often_as_asked():
    task = MostFrequentDigit(32, 0.3, label_noise=0.6)
    tokenizer = task.tokenizer()

    def wrong_share(demonstrations):
        wrong = 0
        for prompt_ids, completion_ids in demonstrations:
            assert completion_ids[-1] == tokenizer.eos_token_id
            ((digit, _),) = Counter(tokenizer.decode(prompt_ids)).most_common(1)
            name = tokenizer.decode(completion_ids, skip_special_tokens=True)
            assert name in DIGIT_NAMES
            wrong += name != DIGIT_NAMES[int(digit)]
        return wrong / len(demonstrations)

    # 2000 draws of probability 0.6: standard deviation 0.011
    assert wrong_share(task.demonstrations(2000)) == pytest.approx(0.6, abs=0.05)
    for noise in (0.0, 1.0):
        assert wrong_share(MostFrequentDigit(32, 0.3, label_noise=noise).demonstrations(50)) == noise
    assert task.demonstrations(0) == []


def test_demonstration_prompts_are_tokenized_as_the_tokenizer_does():
    task = MostFrequentDigit(32)
    tokenizer = task.tokenizer()
    for prompt_ids, completion_ids in task.demonstrations(5):
        assert tokenizer(tokenizer.decode(prompt_ids))["input_ids"] == prompt_ids
        assert tokenizer(tokenizer.decode(completion_ids))["input_ids"] == completion_ids


def test_tokenizer_survives_saving(tmp_path):
    tokenizer = MostFrequentDigit().tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "0123456789" + "".join(DIGIT_NAMES)
    ids = loaded(text)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert loaded.decode(ids) == text
    assert loaded.decode([*ids[:2], loaded.eos_token_id, loaded.pad_token_id], skip_special_tokens=True) == "01"
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == ("<end>", "<pad>", 27)


@pytest.mark.parametrize("options", [{"prompt_length": 0}, {"majority_share": 1.2}, {"label_noise": -0.1}])
def test_bad_options(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        MostFrequentDigit(**options)


def test_what_cannot_be_drawn_is_an_error():
    with pytest.raises(ValueError, match="majority_share"):
        MostFrequentDigit(100, 0.05, val_size=10).rows("val")

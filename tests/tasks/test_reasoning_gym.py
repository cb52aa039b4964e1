import json
import pickle
from collections import Counter

import pytest

from pl_grouprl.data.rows import digest_rows, read_source
from pl_grouprl.rewards import apply_rewards
from pl_grouprl.tasks import ReasoningGym, ReasoningGymScore, generator
from pl_grouprl.tasks import reasoning_gym as source
from pl_grouprl.tasks.generator import decode_entry, encode_entry
from pl_grouprl.tasks.reasoning_gym import extract_answer, is_only_answer
from pl_grouprl.types import Rollout, RolloutGroup


def question(row):
    return row["prompt"][-1]["content"]


def test_splits_share_no_question_and_have_rows_by_weight(rows):
    assert {split: len(own) for split, own in rows.items()} == {"train": 40, "val": 12, "test": 12}
    # A row of each, and the other 38 as 3 to 1: 28.5 and 9.5.
    assert Counter(row["data_source"] for row in rows["train"]) in (
        {"chain_sum": 30, "isomorphic_strings": 10},
        {"chain_sum": 29, "isomorphic_strings": 11},
    )
    questions = [question(row) for own in rows.values() for row in own]
    examples = {message["content"] for row in rows["train"] for message in row["prompt"][1:-1:2]}
    assert len(examples) == 4
    assert len({*questions, *examples}) == 40 + 12 + 12 + 4


def test_prompts_of_a_task_share_the_system_prompt_and_the_examples(rows):
    prompts = [row["prompt"] for own in rows.values() for row in own if row["data_source"] == "chain_sum"]
    assert [message["role"] for message in prompts[0]] == ["system", *["user", "assistant"] * 2, "user"]
    assert all(prompt[:-1] == prompts[0][:-1] for prompt in prompts)
    for asked, answered in zip(prompts[0][1:-1:2], prompts[0][2:-1:2], strict=True):
        first, sign, second = asked["content"].split(":")[1].removesuffix("=").split()
        assert answered["content"] == f"Answer: {int(first) + int(second) * (1 if sign == '+' else -1)}"


def test_a_split_depends_neither_on_the_process_nor_on_the_size_of_training(options, rows, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert ReasoningGym(**{**options, "size": 60}).rows("val") == rows["val"]


@pytest.fixture
def in_process(monkeypatch):
    """Questions are generated here, without starting a process that imports the library."""
    monkeypatch.setattr(source, "generate", lambda request: generator.respond(request)["tasks"])


@pytest.mark.usefixtures("in_process")
def test_prompts_as_strings_and_another_seed(options):
    texts = {"chat": False, "question_format": "Q: {question}", "answer_format": "A: {answer}"}
    own = ReasoningGym(**{**options, **texts, "tasks": "gcd", "num_examples": 1, "seed": 1}).rows("val")
    head, example, asked = own[0]["prompt"].split("\n\n")
    assert head == "Be brief."
    assert [line[:3] for line in example.split("\n")] == ["Q: ", "A: "]
    assert asked.startswith("Q: ")
    assert asked.endswith("\n")


@pytest.mark.usefixtures("in_process")
def test_levels_that_are_listed():
    levels = [{"min_terms": terms, "max_terms": terms} for terms in (2, 5)]
    rows = ReasoningGym({"chain_sum": levels}, size=6, val_size=0, test_size=0).rows("train")
    assert Counter(row["data_source"] for row in rows) == {"chain_sum_level_0": 3, "chain_sum_level_1": 3}
    assert all(question(row).count(" + ") + question(row).count(" - ") == (1, 4)[row["level"]] for row in rows)


def test_levels_of_the_library():
    # gcd: from 2 to 5 numbers, up to 100, 1000, ...; each level has the highest range alone.
    levels = generator.library_levels("gcd", {}, 2)
    assert levels == [json.loads(json.dumps(level)) for level in levels]
    assert [level["max_value"] for level in levels] == sorted({level["max_value"] for level in levels})
    with pytest.raises(generator.GeneratorError, match="99"):
        generator.library_levels("gcd", {}, 99)
    with pytest.raises(generator.GeneratorError, match="'max_value'"):
        generator.library_levels("gcd", {"max_value": 3}, 2)


def test_answers_score_after_a_round_trip_through_a_file(rows, score, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows["val"]), tmp_path / "val.parquet")
    read = read_source(str(tmp_path / "val.parquet"), "val")
    assert digest_rows(read) == digest_rows(read_source(rows["val"], "val"))
    for row in (values for _, values in read):
        score.check_row(row)
        assert score("", f"Answer: {row['answer']}", row["extra_info"]) == 1.0
        assert score("", "Answer: neither", row["extra_info"]) < 1.0
        assert score("", row["answer"], row["extra_info"]) == 0.0  # not in the form that was asked for


def test_the_scorer_is_a_reward_function_of_verls_signature(rows):
    row = next(row for row in rows["train"] if row["data_source"] == "chain_sum" and len(row["answer"]) == 1)
    texts = [f"Answer: {row['answer']}", f"Answer: {row['answer']}x", "no"]
    columns = {name: value for name, value in row.items() if name != "prompt"}
    rewards = {}
    for exact in (False, True):
        rollouts = [Rollout([1], text=text, finish_reason="stop") for text in texts]
        group = RolloutGroup([1], rollouts, 0, columns, row["prompt"], row["data_source"])
        apply_rewards([group], pickle.loads(pickle.dumps(ReasoningGymScore(exact))))
        rewards[exact] = [rollout.reward for rollout in rollouts]
    assert rewards == {False: [1.0, 0.5, 0.0], True: [1.0, 0.0, 0.0]}  # the library: 1 of 2 characters are the answer


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("Answer: {answer}", " Answer:  3\n", True), ("Answer: {answer}", "Answer: 3\nfor 1 + 2 is 3", False),
        ("Answer: {answer}", "So Answer: 3", False), ("Answer: {answer}", "Answer: Answer: 3", False),
        ("Answer: {answer}", "Answer:", True), ("Answer: {answer}", "", False), ("{answer}", "3", True),
        ("{answer}", "3\n4", False), ("<a>{answer}</a>", "<a>3</a>", True),
        ("<a>{answer}</a>", "<a>3\n4</a>", True),  # its end is marked, so an answer may have any number of lines
        ("<a>{answer}</a>", "<a>3</a>.", False), ("<a>{answer}</a>", "<a>3</a><a>3</a>", False),
        ("<a>{answer}</a>", "<a>", False), ("|{answer}|", "|", False), ("{answer}.", "3.", True),
        ("{answer}.", "3. 3.", False),
    ],
)  # fmt: skip
def test_a_completion_is_only_an_answer(template, text, expected):
    answer = extract_answer(template, text, num_lines=1)
    assert (answer is not None and is_only_answer(template, text, answer)) == expected


def test_a_completion_that_says_more_than_its_answer_may_score_0(rows):
    row = next(row for row in rows["train"] if row["data_source"] == "chain_sum")
    strict = ReasoningGymScore(only_answer=True)
    right = f"Answer: {row['answer']}"
    texts = {right: 1.0, f"{right}\nThat was easy.": 0.0, f"I say {right}": 0.0, "Answer: ": 0.0, "": 0.0}
    assert {text: strict("", text, row["extra_info"]) for text in texts} == texts


def test_answers_vote_in_the_form_of_their_row(rows, score):
    row = next(row for row in rows["test"] if row["data_source"] == "chain_sum")
    texts = ["1 + 2 is 3.\nAnswer: 3\nand more", "Answer:  3 ", "3"]
    assert [score.extract_answer(text, row) for text in texts] == ["3", "3", None]


@pytest.mark.parametrize("name", ["knights_knaves", "n_queens", "complex_arithmetic", "boxnet", "tower_of_hanoi"])
def test_entries_with_tuples_and_other_keys_score_as_the_original(name, score):
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(name, seed=3, size=2)
    for entry, other in ((dataset[0], dataset[1]), (dataset[1], dataset[0])):
        text = encode_entry(entry)
        assert decode_entry(text) == entry
        info = {"task": name, "config": "{}", "entry": text, "answer_format": "<answer>{answer}</answer>"}
        for answer in (entry["answer"], other["answer"], "seventeen", "[]"):
            expected = 0.0 if answer is None else dataset.score_answer(answer, entry)
            assert score("", "" if answer is None else f"<answer>{answer}</answer>", info) == expected


def test_an_entry_is_written_as_it_is():
    import numpy as np

    entry = {"a": (1, [2, (3,)]), "b": {1: "x", (0, 1): None}, "c": {"__kind__": "tuple"}, "d": np.float64(0.5)}
    assert decode_entry(encode_entry(entry)) == entry
    assert type(decode_entry(encode_entry(entry))["d"]) is float
    with pytest.raises(TypeError, match=r"an entry contains a value of type builtins\.set"):
        encode_entry({"a": {1}})


def test_an_answer_that_the_scorer_cannot_read_scores_zero(score):
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset("boxnet", seed=1, size=1)
    info = {"task": "boxnet", "config": "{}", "entry": encode_entry(dataset[0]), "answer_format": "{answer}"}
    with pytest.raises(TypeError):
        dataset.score_answer("5", dataset[0])
    assert score("", "5", info) == 0.0


def test_a_scorer_out_of_memory_has_failed(rows, monkeypatch):
    def score_answer(answer, entry):
        raise MemoryError

    score, row = ReasoningGymScore(), rows["val"][0]
    monkeypatch.setattr(score._scorer(row["extra_info"]), "score_answer", score_answer)
    with pytest.raises(MemoryError):
        score("", f"Answer: {row['answer']}", row["extra_info"])


def test_rows_of_another_source_are_refused(score):
    for columns in ({}, {"extra_info": None}, {"extra_info": {"split": "train"}}):
        with pytest.raises(ValueError, match="extra_info"):
            score.check_row(columns)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tasks": []}, "tasks"), ({"tasks": {"gcd": {"weight": 0}}}, "tasks.*'gcd'"), ({"levels": 0}, "levels is 0"),
        ({"tasks": {"gcd": [{"weight": 1}, {"weight": 2}]}}, "tasks.*'gcd'"),
        ({"tasks": {"gcd": [{}, {}], "lcm": {}}}, r"tasks.*\{'gcd': 2, 'lcm': 1\}"),
        ({"tasks": {"gcd": [{}, {}]}, "levels": 2}, "levels=2"), ({"val_size": 1, "tasks": ["gcd", "lcm"]}, "val_size"),
        ({"seed": -1}, "seed is -1"), ({"num_examples": -1}, "num_examples"),
        ({"question_format": "Question:"}, "question_format"), ({"answer_format": "{answer}{answer}"}, "answer_format"),
        ({"answer_format": "A: {answer}"}, "answer_format.*system_prompt"),
        ({"answer_format": "A: {answer}!", "system_prompt": "A: "}, "answer_format.*system_prompt"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        ReasoningGym(**{"tasks": "gcd", **options})


@pytest.mark.usefixtures("in_process")
def test_an_answer_that_contains_what_surrounds_it_is_refused():
    options = {"size": 2, "val_size": 0, "test_size": 0, "system_prompt": "Answer in [brackets]."}
    assert len(ReasoningGym("gcd", answer_format="[{answer}]", **options).rows("train")) == 2
    with pytest.raises(ValueError, match="answer_format is"):
        ReasoningGym("number_sorting", answer_format="[{answer}]", **options).rows("train")


def answer_to(tasks):
    """What the generating process answers, without a process."""
    source = ReasoningGym(tasks, size=20, val_size=0, test_size=0)
    return generator.respond({**source._request(), "split": "train"})


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("gdc", "there is no task 'gdc'; did you mean 'gcd'"),
        ("composite", "there is no task 'composite'"),
        (
            {"gcd": {"max_numbres": 3}},
            "task 'gcd' rejects {'max_numbres': 3}: .*; its options are ['min_numbers', 'max_numb",
        ),
        ({"gcd": {"min_numbers": 1}}, "task 'gcd' rejects {'min_numbers': 1}: "),
        (
            {"gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 2}},
            "has too few different questions: 4 of 20 in 1400 attempts",
        ),
    ],
)
def test_tasks_that_are_refused(tasks, message, monkeypatch):
    monkeypatch.setattr(generator, "_seed_global_generators", lambda seed: None)
    refused = answer_to(tasks)["rejected"]
    assert all(part in refused for part in message.split(".*"))


def test_examples_of_a_task_without_reference_answers(monkeypatch):
    examples = [{"question": "?", "answer": None}]
    monkeypatch.setattr(source, "generate", lambda request: [{"examples": examples, "levels": []}])
    with pytest.raises(ValueError, match="num_examples is 1"):
        ReasoningGym("boxnet", num_examples=1).rows("train")


def test_a_reference_that_the_scorer_would_not_evaluate_is_right(score):
    from reasoning_gym.factory import create_dataset

    entry = create_dataset("string_insertion", seed=1, size=1)[0]  # its answer looks like the name of a variable
    info = {"task": "string_insertion", "config": "{}", "entry": encode_entry(entry), "answer_format": "{answer}"}
    assert score("", entry["answer"], info) == 1.0
    assert score("", "A" + entry["answer"], info) == 0.0

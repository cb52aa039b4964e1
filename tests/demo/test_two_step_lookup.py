"""The task with a tool: two calls give the answer, splits are disjoint, demonstrations are what the policy reads."""

from collections import Counter

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from pl_grouprl.chat import ChatFormat
from pl_grouprl.demo import Directory, TwoStepLookup, WarmStartedPolicy, look_up
from pl_grouprl.demo.tasks import END_TOKEN, PEOPLE, entries

LOOK_UP = get_json_schema(Directory().look_up)
TOKENIZER = TwoStepLookup().tokenizer()
CHAT = ChatFormat(TOKENIZER)


def opened(row):
    directory = Directory()
    assert directory.reset(**row) is None
    return directory


def replay(demonstration):
    """Number of the calls that a demonstration makes, and its answer, as the run's format parses them."""
    prompt_ids, completion_ids, loss_mask = demonstration
    turns, context = [[]], []
    for token, imitated in zip(completion_ids, loss_mask, strict=True):
        if imitated:
            turns[-1].append(token)
            context = []
        else:
            context.append(token)
            if len(context) == 1:
                turns.append([])
    messages = [CHAT.parse(turn, prompt_ids, [LOOK_UP]) for turn in turns]
    assert all(turn[-1] == TOKENIZER.eos_token_id for turn in turns)
    assert all(message["tool_calls"][0]["function"]["arguments"].keys() == {"key"} for message in messages[:-1])
    assert "tool_calls" not in messages[-1]
    return [call["tool_calls"][0]["function"]["arguments"]["key"] for call in messages[:-1]], messages[-1]["content"]


def test_two_calls_give_the_answer_and_one_does_not():
    for row in TwoStepLookup(val_size=20).rows("val"):
        directory = opened(row)
        (message,) = row["prompt"]
        found = directory.look_up(message["content"].removeprefix("telephone of "))
        assert found.startswith("room ")
        assert directory.look_up(found.removeprefix("room ")) == f"telephone {row['answer']}"
        assert row["answer"] not in message["content"] + found
        assert row["data_source"] == "two_step_lookup"


def test_a_directory_is_long_and_tells_strangers_nothing():
    directory = entries(7)
    assert len(directory) == 2 * PEOPLE == 600
    assert Counter(entry.split()[0] for entry in directory.values()) == {"room": 300, "telephone": 300}
    assert opened({"directory": 7}).look_up("nobody") == "no entry"


def test_the_same_arguments_give_the_same_data():
    first, again, other = (TwoStepLookup(train_size=20, seed=seed) for seed in (1, 1, 2))
    assert first.rows("train") == again.rows("train") != other.rows("train")
    assert first.demonstrations(20, 5) == again.demonstrations(20, 5) != first.demonstrations(20, 6)


def test_splits_and_demonstrations_have_directories_of_their_own():
    task = TwoStepLookup(train_size=300, val_size=300, test_size=300)
    numbers = [{row["directory"] for row in task.rows(split)} for split in ("train", "val", "test")]
    assert len(set.union(*numbers)) == 900
    assert [{number % 4 for number in split} for split in numbers] == [{0}, {1}, {2}]  # 3: demonstrations


def test_one_directory_for_all_rows_is_what_the_function_reads():
    task = TwoStepLookup(train_size=600, val_size=300, test_size=300, shared_directory=True)
    people = []
    for split in ("train", "val", "test"):
        rows = task.rows(split)
        people.append({row["prompt"][0]["content"].removeprefix("telephone of ") for row in rows})
        for row in rows[:20]:
            room = look_up(row["prompt"][0]["content"].removeprefix("telephone of ")).removeprefix("room ")
            assert look_up(room) == f"telephone {row['answer']}"
    assert all(len(own) > 50 for own in people)
    assert sum(map(len, people)) == len(set.union(*people)) <= PEOPLE  # nobody in two splits
    assert look_up("nobody") == "no entry"
    assert get_json_schema(look_up) == LOOK_UP  # the base policy reads the same prompts


def test_the_directory_of_the_rows_does_not_change_demonstrations():
    shared, own = TwoStepLookup(shared_directory=True), TwoStepLookup()
    assert shared.demonstrations(20) == own.demonstrations(20)
    sources = [WarmStartedPolicy(task, {"model_type": "qwen3"}).folder for task in (shared, own)]
    assert sources[0] == sources[1]


def test_demonstrations_are_wrong_as_often_as_asked_and_of_each_kind():
    right = [replay(demonstration) for demonstration in TwoStepLookup(mistake_share=0.0).demonstrations(30)]
    assert all(len(keys) == 2 and keys[1].isdigit() and len(answer) == 4 for keys, answer in right)
    kinds = Counter(
        (len(keys), len(set(keys)), len(answer))
        for keys, answer in map(replay, TwoStepLookup(mistake_share=1.0).demonstrations(400))
    )
    # Answers with the room after one call or two of the name; a room cut short, and no call, end in `unknown`.
    assert set(kinds) == {(1, 1, 3), (2, 1, 3), (2, 2, 7), (0, 0, 7)}
    assert all(abs(count - 100) < 44 for count in kinds.values())  # five standard deviations
    mixed = [replay(demonstration)[1] for demonstration in TwoStepLookup(mistake_share=0.7).demonstrations(500)]
    assert sum(len(answer) == 4 for answer in mixed) / 500 == pytest.approx(0.3, abs=0.1)
    assert TwoStepLookup().demonstrations(0) == []
    with pytest.raises(ValueError, match=r"mistake_share is 1\.5"):
        TwoStepLookup(mistake_share=1.5)


def test_demonstrations_are_what_an_episode_reads():
    task = TwoStepLookup(mistake_share=0.0)
    CHAT.check_tools()
    for demonstration in task.demonstrations(5):
        prompt_ids, completion_ids, loss_mask = demonstration
        (name, room), answer = replay(demonstration)
        prompt = [{"role": "user", "content": f"telephone of {name}"}]
        assert prompt_ids == CHAT.encode_prompt(prompt, [LOOK_UP])
        results = [
            {"role": "tool", "name": "look_up", "content": text} for text in (f"room {room}", f"telephone {answer}")
        ]
        read = [token for result in results for token in CHAT.encode_results([result])]
        assert read == [token for token, imitated in zip(completion_ids, loss_mask, strict=True) if not imitated]


def test_the_tokenizer_survives_saving_and_spells_anything(tmp_path):
    tokenizer = TwoStepLookup().tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = 'telephone of bak{"error": "Directory.look_up() takes 1 argument"} ~ room 985 no entry unknown'
    ids = loaded(text)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert loaded.pad_token_id not in ids
    assert loaded.decode(ids) == text
    assert (loaded.eos_token, loaded.chat_template) == (END_TOKEN, tokenizer.chat_template)
    assert loaded.convert_ids_to_tokens(loaded("telephone of bak")["input_ids"]) == ["telephone ", "of ", *"bak"]

import pickle

from pl_grouprl.data.digest import digest_rows
from pl_grouprl.data.sources import read_source
from pl_grouprl.rewards import apply_rewards
from pl_grouprl.tasks import ReasoningGym, ReasoningGymScore
from pl_grouprl.types import Rollout, RolloutGroup

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def question(row):
    return row["prompt"][-1]["content"]


def test_splits_share_no_question(sums):
    _, rows = sums
    assert {split: len(own) for split, own in rows.items()} == {"train": 40, "val": 10, "test": 12}
    questions = [question(row) for own in rows.values() for row in own]
    examples = [message["content"] for message in rows["train"][0]["prompt"][1:-1:2]]
    assert len(examples) == 3
    assert len({*questions, *examples}) == 40 + 10 + 12 + 3


def test_prompts_share_the_system_prompt_and_the_examples(sums):
    _, rows = sums
    prompts = [row["prompt"] for own in rows.values() for row in own]
    assert [message["role"] for message in prompts[0]] == ["system", *["user", "assistant"] * 3, "user"]
    assert all(prompt[:-1] == prompts[0][:-1] for prompt in prompts)
    for asked, answered in zip(prompts[0][1:-1:2], prompts[0][2:-1:2], strict=True):
        expression = asked["content"].split(":")[1].removesuffix("=").split()
        first, sign, second = int(expression[0]), expression[1], int(expression[2])
        assert answered["content"] == f"Answer: {first + second if sign == '+' else first - second}"


def test_rows_depend_on_the_seed_alone_and_the_larger_split_leaves_the_others_unchanged(sums):
    _, rows = sums
    again = ReasoningGym(
        SUMS, size=50, val_size=10, test_size=12, num_examples=3, system_prompt="Add.", answer_format="Answer: {answer}"
    )
    assert again.rows("val") == rows["val"]
    other = ReasoningGym(SUMS, size=4, val_size=10, test_size=0, seed=1).rows("val")
    assert [question(row) for row in other] != [question(row) for row in rows["val"]]


def test_answers_score_after_a_round_trip_through_a_file(sums, score, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    _, rows = sums
    pq.write_table(pa.Table.from_pylist(rows["val"]), tmp_path / "val.parquet")
    read = read_source(str(tmp_path / "val.parquet"), "val")
    assert digest_rows(read) == digest_rows(read_source(rows["val"], "val"))
    for row in (values for _, values in read):
        score.check_row(row)
        assert score("", f"Answer: {row['answer']}", row["extra_info"]) == 1.0
        assert score("", f"Answer: {int(row['answer']) + 100}", row["extra_info"]) < 1.0
        assert score("", row["answer"], row["extra_info"]) == 0.0  # not in the form that was asked for


def test_the_scorer_is_a_reward_function_of_verls_signature(sums):
    _, rows = sums
    row = next(row for row in rows["val"] if len(row["answer"]) == 1)
    texts = [f"Answer: {row['answer']}", f"Answer: {row['answer']}x", "no"]
    columns = {name: value for name, value in row.items() if name != "prompt"}
    rewards = {}
    for exact in (False, True):
        rollouts = [Rollout([1], text=text, finish_reason="stop") for text in texts]
        group = RolloutGroup([1], rollouts, 0, columns, row["prompt"], row["data_source"])
        apply_rewards([group], pickle.loads(pickle.dumps(ReasoningGymScore(exact))))
        rewards[exact] = [rollout.reward for rollout in rollouts]
    assert rewards == {False: [1.0, 0.5, 0.0], True: [1.0, 0.0, 0.0]}  # the library: 1 of 2 characters are the answer


def test_prompts_as_strings():
    options = {"size": 4, "val_size": 2, "test_size": 0, "num_examples": 1, "chat": False, "system_prompt": "Add."}
    source = ReasoningGym(SUMS, question_format="Q: {question}", answer_format="A: {answer}", **options)
    (head, example, asked) = source.rows("val")[0]["prompt"].split("\n\n")
    assert head == "Add."
    assert example.split("\n")[0].startswith("Q: ")
    assert example.split("\n")[1].startswith("A: ")
    assert asked.startswith("Q: ")
    assert asked.endswith(" =\n")

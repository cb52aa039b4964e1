"""Data sets of the hub, as local folders laid out like one, and from the cache without a network."""

import json
import shutil

import pyarrow as pa
import pytest
from helpers.versions import needs
from PIL import Image
from pyarrow import parquet

from pl_grouprl import PromptDataModule
from pl_grouprl.data import HubDataset
from pl_grouprl.data.rows import PromptSource, digest_rows, read_source
from pl_grouprl.demo.tasks import digit_tokenizer

README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: letters
  data_files:
  - {split: train, path: "letters/*.jsonl"}
---
"""
ANSWER = {"answer": "#### (.+)"}


def question(split, number):
    return {"question": f"{split} {number}?", "answer": f"{number} #### 0\nso\n#### {number} ", "level": number % 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repository of two configurations; the first has five rows to train on and three to test."""
    folder = tmp_path_factory.mktemp("hub") / "sums"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for split, count in (("train", 5), ("test", 3)):
        lines = [json.dumps(question(split, number)) for number in range(count)]
        (folder / "main" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "letters").mkdir()
    for letter in "ab":
        (folder / "letters" / f"{letter}.jsonl").write_text(json.dumps({"prompt": letter, "answer": "z"}) + "\n")
    return folder


@pytest.fixture
def source(folder):
    def make(name="main", split=None, **options):
        return HubDataset(str(folder), name, split, cache_dir=str(folder.parent / "cache"), **options)

    return make


def listed(source, split="train"):
    return list(source.rows(split))


def test_rows_of_a_configuration(source):
    assert isinstance(source(), PromptSource)
    assert listed(source("letters")) == [{"prompt": p, "answer": "z", "data_source": "sums"} for p in "ab"]
    assert listed(source())[4] == question("train", 4) | {"data_source": "sums"}


def test_parquet_and_csv_files_without_a_readme(tmp_path):
    (tmp_path / "a").mkdir()
    parquet.write_table(pa.Table.from_pylist([question("table", 0)]), tmp_path / "a" / "train-00000-of-00001.parquet")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "some.csv").write_text("prompt,answer\nx,1\n")
    (table,) = listed(HubDataset(str(tmp_path / "a"), cache_dir=str(tmp_path)))
    assert table == question("table", 0) | {"data_source": "a"}
    files = HubDataset(str(tmp_path / "b"), data_files={"test": "some.csv"}, cache_dir=str(tmp_path))
    assert listed(files, "test") == [{"prompt": "x", "answer": 1, "data_source": "b"}]


def test_splits_and_slices(source):
    own = source(split={"val": "test[:2]"})
    assert [len(own.rows(split)) for split in ("train", "val", "test")] == [5, 2, 3]
    assert [row["question"] for row in listed(source(split="train[3:]"), "test")] == ["train 3?", "train 4?"]
    assert len(source(split="train+test").rows("train")) == 8


def test_columns_are_renamed_or_left_out(source):
    renamed = listed(source(columns={"prompt": "question", "extra_info": "level"}))[1]
    assert renamed == {
        "prompt": "train 1?",
        "extra_info": 1,
        "answer": question("", 1)["answer"],
        "data_source": "sums",
    }
    asked = {"prompt": "question", "text": "question", "answer": "level"}  # one twice, one in the place of another
    replaced = listed(source(columns=asked, keep_other_columns=False, data_source="mine"))[1]
    assert replaced == {"prompt": "train 1?", "text": "train 1?", "answer": 1, "data_source": "mine"}


def test_answers_are_cut_out_and_prompts_written(source):
    messages = [
        {"role": "system", "content": "Write \\boxed{{}}."},
        {"role": "user", "content": "{question} Level {level:02d}."},
    ]
    row = listed(source(extract=ANSWER, messages=messages))[3]
    assert row["answer"] == "3"
    assert row["prompt"] == [
        {"role": "system", "content": "Write \\boxed{}."},
        {"role": "user", "content": "train 3? Level 01."},
    ]
    whole = source(
        extract={"answer": r"\d+"}, columns={"prompt": "question"}, messages=[messages[1] | {"content": "{prompt}"}]
    )
    assert (listed(whole)[2]["answer"], listed(whole)[2]["prompt"][0]["content"]) == ("2", "train 2?")


def test_a_run_reads_and_resumes_by_the_rows(source):
    tokenizer = digit_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "12{level}"}]
    digests = []
    for extract in (ANSWER, ANSWER, {"answer": "#### (0)"}):
        rows = source(split={"val": "test[:2]"}, messages=messages, extract=extract)
        data = PromptDataModule(train=rows, val=rows, test=rows, batch_size=2, tokenizer=tokenizer)
        data.setup("fit")
        data.setup("test")
        digests.append(data.resume_facts()["train"])
    assert {split: len(prompts) for split, prompts in data.prompts.items()} == {"train": 5, "val": 2, "test": 3}
    first = data.prompts["train"][0]
    assert (tokenizer.decode(first.token_ids), first.data_source) == ("120", "sums")
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] == digest_rows(read_source(listed(source(messages=messages, extract=ANSWER)), "train"))


def test_blocks_are_read_when_indexed(source, monkeypatch):
    monkeypatch.setattr("pl_grouprl.data.hub.BLOCK", 2)
    rows = source().rows("train")
    assert [rows[index]["question"] for index in (4, 0, 1, 3)] == [f"train {index}?" for index in (4, 0, 1, 3)]
    rows[0]["question"] = "changed"
    assert rows[0]["question"] == "train 0?"
    with pytest.raises(IndexError, match="no row 5"):
        rows[5]


@needs("datasets", "4.7")
def test_images_stay_encoded_and_json_is_decoded(tmp_path):
    import datasets

    image = Image.new("RGB", (4, 4), (1, 2, 3))
    row = {"prompt": "?", "images": [image], "image": image, "extra_info": {"a": 1}}
    features = datasets.Features(
        prompt=datasets.Value("string"),
        images=[datasets.Image()],
        image=datasets.Image(),
        extra_info=datasets.Json(),
    )
    table = datasets.Dataset.from_list([row], features=features)
    (tmp_path / "shapes").mkdir()
    datasets.disable_progress_bars()
    try:
        table.to_parquet(tmp_path / "shapes" / "train.parquet")
    finally:
        datasets.enable_progress_bars()
    (read,) = listed(HubDataset(str(tmp_path / "shapes"), cache_dir=str(tmp_path / "cache")))
    assert read["extra_info"] == {"a": 1}
    assert read["images"] == [read["image"]]
    assert read["image"]["bytes"].startswith(b"\x89PNG")


def test_the_cache_of_a_data_set_of_the_hub_works_without_a_network(source, folder, tmp_path):
    assert len(source().rows("train")) == 5
    (prepared,) = (folder.parent / "cache" / "sums").glob("main*/0.0.0/*/dataset_info.json")
    shutil.copytree(prepared.parent, tmp_path / "someone___sums" / "main" / "0.0.0" / "0123456789abcdef")
    for file in tmp_path.glob("someone___sums/main/0.0.0/*/*"):
        if file.suffix == ".arrow":
            file.rename(file.with_name(file.name.replace("json-", "sums-")))
    rows = HubDataset("someone/sums", "main", cache_dir=str(tmp_path)).rows("test")
    assert rows[2] == question("test", 2) | {"data_source": "someone/sums"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": None}, "'main', 'letters'"), ({"name": "none"}, "'none'"),
        ({"data_files": "x*.csv"}, "x.*csv|No .*data files"), ({"split": {"train": "dev"}}, "dev"),
        ({"split": "train[:2"}, "train"), ({"columns": {"prompt": "text"}}, "columns has the column 'text'"),
        ({"extract": {"solution": "x"}}, "extract has the column 'solution'"),
        ({"messages": [{"role": "user", "content": r"\boxed{}"}]}, "messages has the column ''"),
        ({"messages": [{"role": "user", "content": "{a.b}"}]}, "messages has the column 'a.b'"),
        ({"columns": {"prompt": "question"}, "messages": [{"role": "user", "content": "{question}"}]},
            "messages has the column 'question'"),
    ],
)  # fmt: skip
def test_what_the_data_set_does_not_have(source, options, text):
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        source(**options).rows("train")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"extract": {"answer": "#### (7)"}}, "row 0: column 'answer'"),
        ({"extract": {"level": "."}}, "row 0: column 'level' is 0"),
        ({"extract": {"answer": "(7)?####"}}, "row 0: column 'answer'"),  # the group is optional
        ({"messages": [{"role": "user", "content": "{question:{width}}"}]}, "row 0: messages"),
        ({"messages": [{"role": "user", "content": "{question:d}"}]}, "row 0: messages"),
    ],
)
def test_a_row_that_does_not_fit(source, options, text):
    with pytest.raises(ValueError, match=text):
        listed(source(**options))


def test_a_prompt_is_not_written_from_a_null(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"q": "a", "a": "1"}\n{"q": null, "a": "1"}\n')
    source = HubDataset(str(tmp_path), messages=[{"role": "user", "content": "{q}"}], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="row 1: column 'q' is null"):
        listed(source)


def test_malformed_options_and_a_missing_package(monkeypatch):
    with pytest.raises(ValueError, match="validation"):
        HubDataset("x/y", split={"validation": "test"})
    monkeypatch.setattr("pl_grouprl.data.hub.DATASETS_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match="HubDataset"):
        HubDataset("x/y")

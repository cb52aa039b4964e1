"""Data that is damaged or malformed: the error names the file, and the row where there is one."""

import io
import json
import random
import warnings

import pyarrow as pa
import pytest
from pyarrow import parquet

from pl_grouprl.data import PromptDataModule
from pl_grouprl.data.rows import read_source
from pl_grouprl.demo.tasks import digit_tokenizer


def load(source, **options):
    data = PromptDataModule(source, batch_size=1, tokenizer=digit_tokenizer(), **options)
    data.setup("fit")
    return data.prompts["train"]


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


GOOD = '{"prompt": "1"}'


MESSAGE = '{"prompt": [{"role": "user", "content": %s}]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1\\ud800"}', r"column 'prompt' has the code point U\+D800"),
        ('{"prompt": "1", "extra_info": {"a": ["\\udfff"]}}', r"column 'extra_info' has the code point U\+DFFF"),
        (MESSAGE % '"\\ud83d"', r"column 'prompt' has the code point U\+D83D"),
        ('{"prompt": null}', "column 'prompt' is None"),
        ('{"prompt": "1", "prompt": "2"}', r"duplicate names \['prompt'\]"),
        ('{"prompt": "1", "n": ' + "9" * 5000 + "}", "not usable JSON"),
        ('{"prompt": ' + "[" * 100000 + "}", "not usable JSON"),
        ('{"prompt": "1", }', r"not usable JSON \(.* column \d+"),
        ('{"prompt": NaN}', "column 'prompt' is nan"),
        (MESSAGE % "3", r"messages\[0\]\.content is '3'"),
        (MESSAGE % '{"type": "text"}', r"messages\[0\]\.content is"),
        (MESSAGE % '[{"type": "text", "text": null}]', r"messages\[0\]\.content\[0\] is"),
        ('{"prompt": "1", "completions": ["2"]}', "column 'completions'"),
        ('{"prompt": "1", "reward_model": "{}"}', "column 'reward_model' is"),
        ('{"prompt": "1", "reward_model": {"ground_truth": NaN}}', "'reward_model.ground_truth' is NaN"),
        ('{"prompt": "1", "answer": NaN}', "'answer' is NaN"),
        ("[]", "a row is an object"),
    ],
    ids=range(17),
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: .*" + message):
        load(write(tmp_path / "x.jsonl", GOOD, line, GOOD))


def test_rows_in_memory_are_checked_too():
    with pytest.raises(ValueError, match=r"train, row 1: column 'a' has the code point U\+DC00"):
        load([{"prompt": "1"}, {"prompt": "1", "a": ("\udc00",)}])


def test_text_that_is_no_utf_8_is_named_and_a_byte_order_mark_skipped(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "1"}\n\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl: not UTF-8 in line 3 "):
        load(str(tmp_path / "x.jsonl"))
    for name, text in (("rows.jsonl", '{"prompt": "\u00e9"}'), ("rows.json", '[{"prompt": "\u00e9"}]')):
        file = tmp_path / name
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=f"{name}: not UTF-8") as caught:
            read_source(str(file), "train")
        assert type(caught.value) is ValueError
        file.write_bytes(text.encode("utf-8-sig"))
        (row,) = read_source(str(file), "train")
        assert row.values == {"prompt": "\u00e9"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "1"},\n {"prompt": }]', "line 2 column 13"), ('[{"prompt": "1"},\n {"prompt": "2"', "line 2"),
        ('[{"prompt": "1"} {"prompt": "2"}]', "line 1 column 18"), ('[{"prompt": "1"}', "line 1 column 17"),
        ('[{"prompt": "1"}] 3', "line 1 column 19"), ('[{"prompt": "1"},]', "line 1 column"),
        ('[{"prompt": "1"}, {"a": 1, "a": 2}]', r"duplicate names \['a'\] in {'a': 2}"), ("[ ]", "has no rows"),
    ],
)  # fmt: skip
def test_a_broken_array_is_named_with_its_place(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json.*" + message):
        load(str(tmp_path / "x.json"))


def test_an_array_keeps_its_rows_and_their_numbers(tmp_path):
    rows = [{"prompt": "1", "a": [1, {"b": "]"}]}, {"prompt": "2"}]
    for text in (json.dumps(rows), json.dumps(rows, indent=3), " [" + json.dumps(rows)[1:] + "\n"):
        (tmp_path / "x.json").write_text(text)
        read = read_source(str(tmp_path / "x.json"), "train")
        assert [row.values for row in read] == rows
        assert [row.where[-5:] for row in read] == ["row 0", "row 1"]


def table(rows=40, row_group_size=10, **options):
    """A parquet file in memory, with text that is not compressed, so that a page can be found in it."""
    stream = io.BytesIO()
    columns = {
        "prompt": [f"{number:05d}" for number in range(rows)],
        "reward_model": [{"ground_truth": str(number), "n": number} for number in range(rows)],
    }
    options = {"compression": "none", "use_dictionary": False, "row_group_size": row_group_size} | options
    parquet.write_table(pa.table(columns), stream, **options)
    return stream.getvalue()


@pytest.mark.parametrize(("options", "byte"), [({"write_page_checksum": True}, b"X"), ({}, b"\xff")])
def test_a_damaged_page_is_named_by_row_group_and_rows(tmp_path, options, byte):
    good = table(**options)
    place = good.index(b"00025")  # in the third row group
    (tmp_path / "x.parquet").write_bytes(good[:place] + byte + good[place + 1 :])
    with pytest.raises(ValueError, match=r"x\.parquet, row group 2 \(rows 20 to 29\): damaged"):
        load(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("cut", [0, 3, 100, -1, -20])
def test_a_file_cut_short_is_named(tmp_path, cut):
    (tmp_path / "x.parquet").write_bytes(table()[:cut])
    with pytest.raises(ValueError, match=r"x\.parquet: damaged"):
        load(str(tmp_path / "x.parquet"))


def test_columns_of_one_name_are_refused(tmp_path):
    columns = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], names=["prompt", "prompt"])
    parquet.write_table(columns, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet: .*names \['prompt'\]"):
        load(str(tmp_path / "x.parquet"))


def test_a_file_without_rows_among_others_is_said(tmp_path):
    paths = [write(tmp_path / "x.jsonl", GOOD), write(tmp_path / "y.jsonl")]
    with pytest.warns(UserWarning, match=r"y\.jsonl has no rows"):
        assert len(load(paths)) == 1


def error_of(function):
    try:
        function()
    except Exception as error:
        return error
    return None


def test_flipped_bytes_end_in_rows_or_in_an_error_that_names_the_file(tmp_path, record_property):
    """400 files with up to three bytes changed, and cut ones; seeded."""
    rng = random.Random(0)
    lines = "".join(json.dumps({"prompt": f"{n}", "reward_model": {"ground_truth": n}}) + "\n" for n in range(8))
    rows = [json.loads(line) for line in lines.splitlines()]
    good = {
        "x.parquet": table(12, 5),
        "y.parquet": table(12, 5, compression="snappy", use_dictionary=True, write_page_checksum=True),
        "x.jsonl": lines.encode(),
        "x.json": json.dumps(rows, indent=1).encode(),
    }
    refused = 0
    for name, content in good.items():
        for _ in range(100):
            damaged = bytearray(content)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            if rng.random() < 0.2:
                del damaged[rng.randrange(len(damaged)) :]
            (tmp_path / name).write_bytes(damaged)
            error = error_of(lambda path=str(tmp_path / name): load(path))
            if error is not None:
                refused += 1
                assert type(error) in (ValueError, OSError), error
                assert name in str(error)
    assert refused > 200
    record_property("figure", f"400 damaged files: {refused} refused by name, {400 - refused} read")


def test_flipped_bytes_in_images_end_in_one_kind_of_error(tmp_path):
    warnings.simplefilter("ignore")  # PIL's, of what it reads all the same
    from PIL import Image

    from pl_grouprl.media.rows import check_image, read_image

    rng = random.Random(1)
    picture = Image.frombytes("RGB", (16, 16), rng.randbytes(768))
    refused = 0
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"):
        stream = io.BytesIO()
        picture.save(stream, kind)
        for _ in range(30):
            damaged = bytearray(stream.getvalue())
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(min(len(damaged), 200))] = rng.randrange(256)
            (tmp_path / "x.image").write_bytes(damaged)
            for read in (check_image, read_image):
                error = error_of(lambda read=read: read(str(tmp_path / "x.image")))
                refused += error is not None
                assert error is None or type(error) is ValueError, error
    assert refused > 50

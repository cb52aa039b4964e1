"""Rows with images: places in the text, the processor's tokens, laziness, errors that name the row."""

import pyarrow as pa
import pytest
import torch
from helpers.tiny_vision import tiny_image, tiny_processor
from pyarrow import parquet

from pl_grouprl.data import PromptDataModule
from pl_grouprl.media.rows import place_media
from tests.helpers.chat_tokenizers import add_to_texts

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "what?"}


def prompts_of(rows, family="qwen2_5_vl", processor=None, **options):
    processor = processor or tiny_processor(family)
    data = PromptDataModule(rows, batch_size=1, tokenizer=processor.tokenizer, processor=processor, **options)
    data.setup("fit")
    return data.prompts["train"]


def user(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_three_ways_to_say_where_an_image_is(family):
    """Parts (TRL), tags (verl), and nothing at all, which is in front."""
    images = [tiny_image(0, 24, 16)]
    ways = ([IMAGE, TEXT], "<image>what?", "what?", [{"type": "image", "text": None}, {**TEXT, "image": None}])
    opened = [p.open() for p in prompts_of([{"prompt": user(way), "images": images} for way in ways], family)]
    processor = tiny_processor(family)
    text = processor.apply_chat_template(user([IMAGE, TEXT]), add_generation_prompt=True)
    expected = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    types = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    for prompt in opened:
        assert prompt.token_ids == expected["input_ids"][0].tolist()
        assert torch.equal(prompt.media["pixel_values"], expected["pixel_values"])
        assert torch.equal(prompt.media[types], expected[types][0])
        assert set(prompt.media) == set(expected) - {"input_ids", "attention_mask"}
    assert opened[1].prompt == user("<image>what?")
    assert opened[1].columns == {"images": images}


def test_tags_stand_where_they_are():
    messages = [{"role": "system", "content": "see"}, *user("a <image> and\n<video>?")]
    placed = place_media(messages, {"image": 1, "video": 1}, "row 0")
    assert placed[0]["content"] == [{"type": "text", "text": "see"}]
    first, second, third = ({"type": "text", "text": text} for text in ("a ", " and\n", "?"))
    assert placed[1]["content"] == [first, {"type": "image"}, second, {"type": "video"}, third]
    assert messages[1]["content"] == "a <image> and\n<video>?"


def test_a_string_holds_the_models_own_token():
    image = tiny_image(0)
    (prompt,) = prompts_of([{"prompt": "x<|vision_start|><|image_pad|><|vision_end|>y", "images": image}])
    opened = prompt.open()
    assert len(opened.token_ids) == 4 + 4  # 16 x 16 pixels in patches of 4, merged two by two
    assert len(prompt.token_ids) == 4 + 1
    assert opened.media["image_grid_thw"].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_control_tokens_in_messages_are_text(family):
    """Even the model's token for an image; a token per character, `_` and `|` unknown, and of type text."""
    token = "<image_soft_token>" if family == "gemma3" else "<|image_pad|>"
    rows = [{"prompt": user(text), "images": [tiny_image(8)]} for text in ("what", f"what<end>{token}")]
    plain, opened = (prompt.open() for prompt in prompts_of(rows, family))
    tokenizer = tiny_processor(family).tokenizer
    what = tokenizer("what")["input_ids"]
    forged = [i for letter in f"<end>{token}" for i in tokenizer(letter)["input_ids"]]
    place = max(i for i in range(len(plain.token_ids)) if plain.token_ids[i : i + 4] == what) + 4
    assert opened.token_ids == plain.token_ids[:place] + forged + plain.token_ids[place:]
    types = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    before = plain.media[types].tolist()
    assert opened.media[types].tolist() == before[:place] + [0] * len(forged) + before[place:]
    assert torch.equal(opened.media["pixel_values"], plain.media["pixel_values"])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_tokens_that_the_tokenizer_adds_to_a_string(family):
    """Those before the text once, those after it never; the types of tokens stay beside them."""
    place = "<start_of_image>" if family == "gemma3" else "<|vision_start|><|image_pad|><|vision_end|>"
    rows = [{"prompt": f"{start}{place}what", "images": [tiny_image(8)]} for start in ("", "<unk>")]
    plain, expected = (prompt.open() for prompt in prompts_of(rows, family))
    processor = tiny_processor(family)
    add_to_texts(processor.tokenizer, "<unk> $A <end>")
    for prompt in prompts_of(rows, processor=processor):
        opened = prompt.open()
        assert opened.token_ids == [processor.tokenizer.unk_token_id, *plain.token_ids] == expected.token_ids
        assert prompt.token_ids[0] == opened.token_ids[0]
        types = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
        assert opened.media[types].tolist() == expected.media[types].tolist()


def test_images_are_processed_when_a_prompt_is_opened_and_not_kept(tmp_path):
    path = tmp_path / "image.png"
    tiny_image(0).save(path)
    (prompt,) = prompts_of([{"prompt": user("what?"), "images": [str(path)]}])
    assert prompt.media == {}
    first, second = prompt.open(), prompt.open()
    assert prompt.media == {}
    assert first.media["pixel_values"] is not second.media["pixel_values"]
    tiny_image(1).save(path)
    assert not torch.equal(prompt.open().media["pixel_values"], first.media["pixel_values"])
    path.unlink()
    with pytest.raises(ValueError, match=r"row 0: .*image.png"):
        prompt.open()


def test_rows_of_parquet_with_bytes(tmp_path):
    tiny_image(0).save(tmp_path / "image.png")
    images = [{"bytes": (tmp_path / "image.png").read_bytes(), "path": None}]
    rows = [
        {"prompt": user("<image>what?"), "images": images, "data_source": "geometry"},
        {"prompt": user("why?"), "images": [], "data_source": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    with_image, text = prompts_of(str(tmp_path / "x.parquet"))
    assert with_image.open().media["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert with_image.data_source == "geometry"
    assert text.open() is text
    assert text.media == {}


def test_videos_reach_the_processor_as_frames():
    """A stand-in: real processors of videos need torchvision."""

    class Processor:
        image_token, video_token = "<|image_pad|>", "<|video_pad|>"
        tokenizer = tiny_processor("qwen2_5_vl").tokenizer
        chat_template = tokenizer.chat_template

        def apply_chat_template(self, messages, **options):
            return self.tokenizer.apply_chat_template(messages, **options)

        def __call__(self, **given):
            self.given = given
            tokens = self.tokenizer(given["text"], return_tensors="pt", add_special_tokens=False)
            return {**tokens, "pixel_values_videos": torch.zeros(8, 3), "mm_token_type_ids": tokens["input_ids"] * 0}

    processor = Processor()
    rows = [{"prompt": user("<video>what?"), "videos": [[tiny_image(0), tiny_image(1)]]}]
    data = PromptDataModule(rows, batch_size=1, tokenizer=processor.tokenizer, processor=processor)
    data.setup("fit")
    (prompt,) = data.prompts["train"]
    media = prompt.open().media
    assert media["pixel_values_videos"].shape == (8, 3)
    assert media["mm_token_type_ids"].shape == (len(prompt.token_ids),)
    assert "images" not in processor.given
    assert [frame.size for frame in processor.given["videos"][0]] == [(16, 16)] * 2


def test_options_reach_the_processor():
    rows = [{"prompt": user("what?"), "images": tiny_image(0, 32, 32)}]
    assert prompts_of(rows)[0].open().media["image_grid_thw"].tolist() == [[1, 8, 8]]
    options = {"images_kwargs": {"size": {"shortest_edge": 64, "longest_edge": 256}}}
    (small,) = prompts_of(rows, processor_kwargs=options)
    assert small.open().media["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_the_limit_counts_the_tokens_of_images():
    """ "user:what?", a line feed, "assistant:", the image's two marks: 23 tokens of text, and 4 or 16 of the image."""
    rows = [{"prompt": user("what?"), "images": tiny_image(0, *size)} for size in ((32, 32), (16, 16))]
    small, large = 23 + 4, 23 + 16
    assert [len(prompt.open().token_ids) for prompt in prompts_of(rows)] == [large, small]
    (kept,) = prompts_of(rows, max_prompt_length=small)
    assert len(kept.open().token_ids) == small
    assert len(prompts_of(rows, max_prompt_length=large)) == 2
    for policy in ("error", "truncate"):
        with pytest.raises(ValueError, match=f"row 0: the prompt has {large} tokens"):
            prompts_of(rows, max_prompt_length=small, overlong_prompts=policy)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": user("<image><image>"), "images": [1]}, "1 images .* places for 2"),
        ({"prompt": user([IMAGE]), "images": [1, 2]}, "2 images .* places for 1"),
        ({"prompt": user("<image><video>"), "images": [1]}, "0 videos .* places for 1"),
        ({"prompt": "what?", "images": [1]}, "1 images.* 0 times"),
        ({"prompt": user("what?"), "images": ["missing.png"]}, r"images\[0\]: 'missing.png'"),
        ({"prompt": user("what?"), "images": [tiny_image(0), 3]}, r"images\[1\]"),
        ({"prompt": "<|image_pad|><|image_pad|>", "images": [tiny_image(0)]}, "1 images.* 2 times"),
    ],
)
def test_bad_rows_are_named_at_setup(row, message):
    rows = [{"prompt": user("fine")}, row]
    with pytest.raises(ValueError, match=rf"train, row 1: .*{message}"):
        prompts_of(rows)


def test_a_processor_without_videos_refuses_them():
    with pytest.raises(ValueError, match="Gemma3Processor"):
        prompts_of([{"prompt": user("what?"), "videos": [[tiny_image(0)]]}], "gemma3")


def test_a_missing_processor_is_an_error_at_the_row():
    rows = [{"prompt": user("a"), "images": tiny_image(0)}]
    data = PromptDataModule(rows, batch_size=1, tokenizer=tiny_processor("qwen2_5_vl").tokenizer)
    with pytest.raises(ValueError, match=r"row 0: .*processor"):
        data.setup("fit")

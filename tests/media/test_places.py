"""Places without images, images without places, and texts that only look as if they had one."""

import pytest
from helpers.tiny_models import tiny_model
from helpers.tiny_vision import tiny_image, tiny_processor, tiny_vision_model

from pl_grouprl.data import PromptDataModule
from pl_grouprl.media.rows import place_media, reads_media
from pl_grouprl.models.policy import PretrainedPolicy

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "what?"}


def user(content):
    return [{"role": "user", "content": content}]


def prompts_of(rows, *, processor=True, **options):
    """With a processor, as for a model that reads images, or with its tokenizer alone."""
    full = tiny_processor("qwen2_5_vl")
    options |= {"batch_size": 1, "tokenizer": full.tokenizer, "processor": full if processor else None}
    data = PromptDataModule(rows, **options)
    data.setup("fit")
    return data.prompts["train"]


@pytest.mark.parametrize(
    ("row", "processor"),
    [
        ({"prompt": user("<image>what?")}, True),
        ({"prompt": user("<video>what?")}, True),
        ({"prompt": "<image>what?"}, True),
        ({"prompt": user([{"type": "text", "text": "<image>what?"}])}, True),
        ({"prompt": user("<image>what?"), "images": []}, False),
        ({"prompt": user("<image>what?"), "images": None}, False),
        ({"prompt": user("<image>what?"), "image": None}, False),
        ({"prompt": user([IMAGE, TEXT])}, False),
    ],
)
def test_places_without_images_are_refused(row, processor):
    """Where there is a column for images, or a model that reads them."""
    rows = [{"prompt": user("fine")}, row]
    with pytest.raises(ValueError, match="row 1: the prompt has places"):
        prompts_of(rows, processor=processor)


@pytest.mark.parametrize("prompt", ["<image>what?", user("an <image> tag"), user([{**TEXT, "text": "<video>"}])])
def test_a_text_about_tags_is_text_to_a_model_of_text(prompt):
    (row,) = prompts_of([{"prompt": prompt, "answer": "<image>"}], processor=False)
    assert row.prompt == prompt
    assert row.open() is row


@pytest.mark.parametrize("prompt", ["<|image_pad|>what?", user("<|video_pad|>"), user([{**TEXT, "image": "x"}])])
def test_the_models_own_token_without_images_is_refused(prompt):
    """The last one by the template, which asks whether a part has the key of an image."""
    full = tiny_processor("qwen2_5_vl")
    template = full.chat_template.replace("c.type == 'image'", "c.type == 'image' or 'image' in c")
    full.tokenizer.chat_template = full.chat_template = template
    options = {"batch_size": 1, "tokenizer": full.tokenizer, "split_special_tokens": False}
    data = PromptDataModule([{"prompt": "a"}, {"prompt": prompt}], **options)
    data.processor = full
    with pytest.raises(ValueError, match="row 1: the row has 0"):
        data.setup("fit")


def test_keys_that_parquet_fills_up_are_not_images():
    full = tiny_processor("qwen2_5_vl")
    template = full.chat_template.replace("c.type == 'image'", "c.type == 'image' or 'image' in c")
    full.tokenizer.chat_template = full.chat_template = template
    rows = [{"prompt": user([{**TEXT, "image": None}])}, {"prompt": user([TEXT])}]
    data = PromptDataModule(rows, batch_size=1, tokenizer=full.tokenizer, processor=full)
    data.setup("fit")
    first, second = data.prompts["train"]
    assert first.token_ids == second.token_ids


def test_a_lone_image_is_that_of_the_singular_column():
    """TRL's `image`, beside a missing or empty `images`; other names are taken as they are given."""
    small, large = tiny_image(0), tiny_image(0, 32, 32)
    rows = [{"prompt": user("what?"), "image": small}, {"prompt": user("what?"), "images": None, "image": small}]
    for prompt in prompts_of(rows):
        assert prompt.open().media["image_grid_thw"].tolist() == [[1, 4, 4]]
    (plural,) = prompts_of([{"prompt": user("what?"), "images": [large], "image": small}])
    assert plural.open().media["image_grid_thw"].tolist() == [[1, 8, 8]]
    (text,) = prompts_of([{"prompt": user("what?"), "image": small}], image_column="picture")
    assert text.open() is text
    with pytest.raises(ValueError, match="image_column"):
        prompts_of([{"prompt": user("what?"), "image": small}], processor=False)


def test_tags_inside_the_parts_of_a_message():
    placed = place_media(user([{"type": "text", "text": "a <image>b"}, TEXT]), {"image": 1, "video": 0}, "row 0")
    assert placed[0]["content"] == [{"type": "text", "text": "a "}, IMAGE, {"type": "text", "text": "b"}, TEXT]
    rows = [{"prompt": user(way), "images": [tiny_image(0)]} for way in ("a<image>b", [{**TEXT, "text": "a<image>b"}])]
    first, second = (prompt.open() for prompt in prompts_of(rows))
    assert first.token_ids == second.token_ids


def test_what_tools_return_is_not_made_of_parts():
    messages = [*user("a"), {"role": "assistant", "content": None}, {"role": "tool", "content": [{"degrees": 3}]}]
    placed = place_media(messages, {"image": 1, "video": 0}, "row 0")
    assert [message["content"] for message in placed[1:]] == [[], [{"degrees": 3}]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": user([{"text": "what?"}])}, r"content\[0\]"),
        ({"prompt": user([{"type": None, "text": "b"}])}, r"content\[0\]"),
        ({"prompt": user([TEXT, "what?"]), "images": [tiny_image(0)]}, r"content\[1\]"),
        ({"prompt": user(None), "images": [tiny_image(0)]}, "content is None"),
        ({"prompt": user([{"type": "image_url", "image_url": {"url": "x.png"}}])}, "image_url"),
        ({"prompt": user([{**IMAGE, "image": tiny_image(1)}, TEXT]), "images": [tiny_image(0)]}, "column"),
        ({"prompt": user([IMAGE, {**TEXT, "text": "<image>what?"}]), "images": [tiny_image(0)]}, "places for 2"),
    ],
)
def test_malformed_parts_are_named_with_their_row(row, message):
    with pytest.raises(ValueError, match=rf"train, row 1: .*{message}"):
        prompts_of([{"prompt": user("fine")}, row])


@pytest.mark.parametrize("options", [{"image_kwarg": {}}, {"images_kwargs": {"sizes": 3}}, {"return_tensors": "np"}])
def test_options_that_the_processor_would_ignore_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        prompts_of([{"prompt": user("what?"), "images": [tiny_image(0)]}], processor_kwargs=options)


def test_which_policies_read_images(tmp_path):
    for name, model in (("vision", tiny_vision_model("gemma3")), ("text", tiny_model("llama"))):
        model.config.save_pretrained(tmp_path / name)
    assert reads_media(PretrainedPolicy(str(tmp_path / "vision")))
    assert not reads_media(PretrainedPolicy(str(tmp_path / "text")))
    assert not reads_media(None)


def test_a_text_run_of_a_model_that_reads_images_does_without_a_processor(tmp_path, caplog):
    """Its tags are refused all the same."""
    tiny_vision_model("qwen2_5_vl").config.save_pretrained(tmp_path)
    tokenizer = tiny_processor("qwen2_5_vl").tokenizer

    class Module:
        policy_source = PretrainedPolicy(str(tmp_path))

    def load(content):
        data = PromptDataModule([{"prompt": user(content)}], batch_size=1, tokenizer=tokenizer)
        data._module = Module
        data.setup("fit")
        return data.prompts["train"]

    assert load("what?")[0].token_ids
    with pytest.raises(ValueError, match="the prompt has places for images or videos"):
        load("<image>what?")

import dataclasses
import random

import pytest
import torch

from pl_grouprl.demo.warm_start import Demonstrations, WarmStartedPolicy, build_model, supervised_loss

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@dataclasses.dataclass
class LastDigit:
    """Prompts of digits, of uneven length; the completion repeats the last digit and ends."""

    digits: int = 4

    def demonstrations(self, count, seed):
        rng = random.Random(seed)
        prompts = [[rng.randrange(10) for _ in range(self.digits + i % 2)] for i in range(count)]
        return [(prompt, [prompt[-1], 10]) for prompt in prompts]

    def tokenizer(self):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {**{str(i): i for i in range(10)}, "<end>": 10, "<pad>": 11}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def make_policy(tmp_path, **options):
    options = {"steps": 3, "batch_size": 4, "progress_bar": False, "cache_dir": str(tmp_path), **options}
    return WarmStartedPolicy(options.pop("task", LastDigit()), options.pop("architecture", ARCHITECTURE), **options)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_task_protocol_is_met_by_shape():
    assert isinstance(LastDigit(), Demonstrations)


def test_loss_equals_the_mean_over_completion_tokens_one_pair_at_a_time():
    model = build_model(ARCHITECTURE, LastDigit().tokenizer())
    pairs = [([1, 2, 3], [4, 10]), ([5, 6], [7, 8, 10]), ([9], [])]

    total, count = 0.0, 0
    for prompt, completion in pairs:
        logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        for offset, token in enumerate(completion):
            total = total - logprobs[len(prompt) - 1 + offset, token]
            count += 1
    expected = total / count
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))

    loss = supervised_loss(model, pairs)
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    assert count == 5
    torch.testing.assert_close(loss, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-4)


def test_tokens_outside_the_loss_mask_are_read_and_not_imitated():
    model = build_model(ARCHITECTURE, LastDigit().tokenizer())
    prompt, completion, loss_mask = [1, 2, 3], [4, 5, 6, 10], [1, 0, 1, 1]
    logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    expected = -(logprobs[2, 4] + logprobs[4, 6] + logprobs[5, 10] + logprobs[0, 7]) / 4

    loss = supervised_loss(model, [(prompt, completion, loss_mask), ([1], [7])])

    torch.testing.assert_close(loss, expected)


def test_the_policy_learns_the_task(tmp_path):
    policy = make_policy(tmp_path, steps=120, batch_size=16, learning_rate=1e-2).load()
    pairs = LastDigit().demonstrations(50, seed=10**9)
    with torch.no_grad():  # guessing the digit gives ln(10) / 2 = 1.15
        assert float(supervised_loss(policy, pairs)) < 0.5


def test_vocabulary_and_special_tokens_come_from_the_tokenizer(tmp_path):
    source = make_policy(tmp_path, steps=0)
    config = source.load().config
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (12, 10, 11)
    assert source.load_tokenizer().eos_token_id == 10


def test_same_options_give_the_same_weights_and_leave_the_global_generator_alone(tmp_path):
    torch.manual_seed(1)
    expected_draw = torch.rand(3)
    torch.manual_seed(1)
    first = make_policy(tmp_path / "a").load()
    assert torch.equal(torch.rand(3), expected_draw)
    torch.manual_seed(2)
    second = make_policy(tmp_path / "b").load()
    assert torch.equal(weights(first), weights(second))


def test_the_second_load_takes_the_finished_folder(tmp_path, monkeypatch):
    source = make_policy(tmp_path)
    first = source.load()
    monkeypatch.setattr(WarmStartedPolicy, "_train", lambda self, model: pytest.fail("trained again"))
    second = make_policy(tmp_path).load()
    assert torch.equal(weights(first), weights(second))
    assert [path.name for path in tmp_path.iterdir()] == [source.folder.name]


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 4}, {"seed": 1}, {"batch_size": 5}, {"learning_rate": 1e-3}, {"max_grad_norm": 2.0},
        {"task": LastDigit(digits=5)}, {"architecture": {**ARCHITECTURE, "hidden_size": 32}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_every_option_that_matters_is_part_of_the_key(tmp_path, change):
    assert make_policy(tmp_path, **change).folder != make_policy(tmp_path).folder


class PlainTask:
    def __init__(self, noise, nested=None):
        self.noise = noise
        self.nested = nested
        self._cache = object()

    def demonstrations(self, count, seed):
        return LastDigit().demonstrations(count, seed)

    def tokenizer(self):
        return LastDigit().tokenizer()


class OtherPlainTask(PlainTask):
    pass


def test_options_of_the_task_that_the_first_demonstrations_do_not_show_are_part_of_the_key(tmp_path):
    tasks = [LastDigit(), PlainTask(0.6), PlainTask(0.605), OtherPlainTask(0.6), PlainTask(0.6, PlainTask(1))]
    folders = [make_policy(tmp_path, task=task).folder for task in tasks]
    assert len(set(folders)) == len(tasks)
    assert make_policy(tmp_path / "a").folder.name == make_policy(tmp_path / "b", progress_bar=True).folder.name
    assert make_policy(tmp_path, task=PlainTask(0.6, PlainTask(1))).folder == folders[-1]


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    source = make_policy(tmp_path, steps=0)

    def disk_full(*_args):
        raise OSError("No space left on device")

    monkeypatch.setattr("pl_grouprl.demo.warm_start.os.replace", disk_full)
    with pytest.raises(OSError, match="No space"):
        source.load()
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way_is_untouched_and_an_error_before_training(tmp_path, monkeypatch):
    source = make_policy(tmp_path)
    source.folder.write_text("mine")
    monkeypatch.setattr(WarmStartedPolicy, "_train", lambda self, model: pytest.fail("trained"))
    with pytest.raises(FileExistsError, match="cache_dir"):
        source.load()
    assert source.folder.read_text() == "mine"


def test_options_of_the_architecture_are_checked():
    with pytest.raises(ValueError, match="hiden_size"):
        build_model({**ARCHITECTURE, "hiden_size": 8}, LastDigit().tokenizer())


@pytest.mark.parametrize(
    ("option", "value"), [("steps", -1), ("batch_size", 0), ("learning_rate", -1.0), ("max_grad_norm", 0.0)]
)
def test_numbers_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=f"WarmStartedPolicy.{option} is {value}"):
        WarmStartedPolicy(LastDigit(), ARCHITECTURE, **{option: value})

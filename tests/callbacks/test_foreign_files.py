"""What a run has not written is untouched, and an error before training where it stands in the way."""

import pytest
from helpers.tiny_models import tiny_model

from pl_grouprl.callbacks import CompletionsTable, ExportPolicy, RunSummary

NAMES = ["policy", "completions.jsonl", "summary.json", "curves.png", "options.json"]


@pytest.fixture
def writers(counter):
    counter.policy = tiny_model("qwen3")
    return [CompletionsTable(console=False), RunSummary(), ExportPolicy(tokenizer_attribute=None)]


def put(path, kind):
    """Put something of the user's there; returns a file of it that must stay."""
    mine = path if kind == "file" else path / "mine.txt"
    if kind == "link":
        (path.parent / "elsewhere").mkdir(parents=True)
        path.symlink_to("elsewhere")
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    return mine


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "file") for name in NAMES), ("policy", "folder"), ("policy", "link"), ("curves.png", "link")],
)
def test_what_stands_in_the_way_is_an_error_before_training(fit, counter, writers, tmp_path, name, kind):
    path = tmp_path / "version_0" / name
    mine = put(path, kind)
    writer = {"policy": "ExportPolicy", "completions.jsonl": "CompletionsTable"}.get(name, "RunSummary")
    with pytest.raises(FileExistsError, match=f"{writer} would write to .*{name}"):
        fit(counter, *writers, max_steps=1)
    assert counter.trainer.global_step == 0
    assert mine.read_text() == "mine"
    assert path.is_symlink() == (kind == "link")


def test_files_of_the_users_in_the_root_folder_are_left_alone(fit, counter, writers, tmp_path):
    files = [put(tmp_path / name, "folder" if name == "policy" else "file") for name in NAMES]
    fit(counter, *writers, logger=False)
    assert [file.read_text() for file in files] == ["mine"] * len(NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*NAMES, "version_0"])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_appears_during_training_is_untouched_too(fit, counter, tmp_path, kind):
    counter.policy = tiny_model("qwen3")
    target = tmp_path / "version_0" / "policy"
    counter.on_train_start = lambda: put(target, kind)
    with pytest.raises(FileExistsError, match=r"ExportPolicy would write to .*policy"):
        fit(counter, ExportPolicy(tokenizer_attribute=None), max_steps=1)
    assert (target if kind == "file" else target / "mine.txt").read_text() == "mine"
    assert not list(target.parent.glob(".policy*"))


def test_only_a_former_export_is_replaced(fit, counter, tmp_path):
    counter.policy = tiny_model("qwen3")
    target = tmp_path / "exported"
    for steps in (1, 2):
        fit(counter, ExportPolicy(tokenizer_attribute=None, folder=str(target)), max_steps=steps, logger=False)
        assert f'"step": {steps}' in (target / "export.json").read_text()
    (target / "export.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"would write to .*exported"):
        fit(counter, ExportPolicy(tokenizer_attribute=None, folder=str(target)), max_steps=3, logger=False)
    assert (target / "model.safetensors").is_file()


def test_two_callbacks_that_write_to_one_place_are_refused(fit, counter):
    counter.policy = counter.critic = tiny_model("qwen3")
    exports = [ExportPolicy(name, tokenizer_attribute=None) for name in ("policy", "critic")]
    with pytest.raises(ValueError, match=r"ExportPolicy would write to .*policy, as another callback does"):
        fit(counter, *exports, max_steps=1)

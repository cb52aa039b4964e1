"""The code blocks of the documentation run, its configurations parse, and the names in its tables exist."""

import inspect
import pkgutil
import re
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.cli_runs import config_of
from helpers.documents import DOCS, blocks
from helpers.qwen_tokenizer import qwen_tokenizer
from lightning.pytorch import Callback, Trainer

from pl_grouprl import GRPO, PPO, PromptDataModule, SamplingConfig, SharedPrefixCallback
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.chat import ChatFormat
from pl_grouprl.demo import MostFrequentDigit, WarmStartedPolicy
from pl_grouprl.episodes.loop import EpisodeLimits, EpisodeLoop
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.functional import advantages, policy_loss
from pl_grouprl.models import LoRAAdapter, PretrainedPolicy
from pl_grouprl.rewards import LeadingCorrectCharacters
from pl_grouprl.rollout import HFRolloutEngine, VLLMRolloutEngine, VLLMServerRolloutEngine
from pl_grouprl.training import (
    EntropyOptions,
    EpisodeOptions,
    EvaluationOptions,
    GuardOptions,
    ImportanceSampling,
    KLOptions,
    RewardCallOptions,
    SharingOptions,
)
from pl_grouprl.types import Prompt, Rollout

ENGINES = HFRolloutEngine, VLLMRolloutEngine, VLLMServerRolloutEngine


def here_cells(page: str) -> list[str]:
    """What stands in backticks in the column "here" of the tables of a page."""
    found, column = [], None
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if "here" in cells:
            column = cells.index("here")
        elif not cells:
            column = None
        elif column is not None:
            found += re.findall(r"`([^`]+)`", cells[column])
    return found


def parameters(*classes: type) -> set[str]:
    """Names that the constructors take, those that are handed on by **kwargs included."""
    return {name for cls in classes for name in inspect.signature(cls.__init__).parameters} - {"self", "args", "kwargs"}


OPTIONS = {
    "model.init_args": parameters(*[cls for cls in GRPO.__mro__ if cls.__module__.startswith("pl_grouprl")]),
    "model.init_args.sampling": parameters(SamplingConfig),
    "model.init_args.optimizer": parameters(OptimizerConfig),
    "model.init_args.sharing": parameters(SharingOptions),
    "model.init_args.episodes": parameters(EpisodeOptions),
    "model.init_args.evaluation": parameters(EvaluationOptions),
    "model.init_args.reward_calls": parameters(RewardCallOptions),
    "model.init_args.kl": parameters(KLOptions),
    "model.init_args.entropy_coef": parameters(EntropyOptions),
    "model.init_args.importance_sampling": parameters(ImportanceSampling),
    "model.init_args.guards": parameters(GuardOptions),
    "model.init_args.policy_loss": {"delta", "epsilon_max"},
    "model.init_args.policy.init_args": parameters(PretrainedPolicy),
    "model.init_args.policy.init_args.adapter": parameters(LoRAAdapter),
    "model.init_args.engine.init_args": parameters(*ENGINES) - {"model", "tokenizer"},
    "data.init_args": parameters(PromptDataModule),
    "trainer": parameters(Trainer),
}


PAGES = sorted(path.name for path in DOCS.glob("*.md"))
WITH_BLOCKS = [page for page in PAGES if page != "coming_from_trl.md"]  # test_port_from_trl.py runs that page


@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if blocks(page, "python")])
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module, registry in ((policy_loss, "POLICY_LOSSES"), (advantages.base, "ADVANTAGE_ESTIMATORS")):
        monkeypatch.setattr(module, registry, dict(getattr(module, registry)))
    names = {"__name__": f"docs_{page.removesuffix('.md')}"}
    for line, code in blocks(page, "python"):
        # Line numbers of a traceback are those of the page.
        exec(compile("\n" * (line - 1) + code, str(DOCS / page), "exec"), names)


def test_the_python_of_the_readme_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit = Trainer.fit

    def two_steps(trainer, *args):
        trainer.fit_loop.epoch_loop.max_steps = 2
        fit(trainer, *args)

    monkeypatch.setattr(Trainer, "fit", two_steps)
    names = {"__name__": "readme"}
    for line, code in blocks("../README.md", "python"):
        exec(compile("\n" * (line - 1) + code.replace("steps=400", "steps=2"), "README.md", "exec"), names)
    folder = Path(names["trainer"].log_dir)
    assert {"checkpoints", "completions.jsonl", "curves.png", "policy", "summary.json"} <= {
        own.name for own in folder.iterdir()
    }
    assert issubclass(names["MedianBaseline"], GRPO)


def test_the_table_of_token_groups_is_what_the_block_before_it_computes():
    names = {"__name__": "docs_group_ppo"}
    exec(blocks("group_ppo.md", "python")[0][1], names)
    lines = (DOCS / "group_ppo.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    shown = {name: own for name, *own in cells}
    of = {
        "critic's prediction before the token": "values",
        "td error": "errors",
        "advantage in GROUP PPO": "by_group",
        "in PPO": "by_token",
    }
    for row, name in of.items():
        assert shown[row] == [f"{number:.2f}" for number in names[name][0].tolist()], row
    assert shown["token group"] == [str(index) for index in names["groups"].group_index[0].tolist()]


def test_the_transcript_of_an_episode_is_what_the_tool_of_the_page_makes():
    names = {"__name__": "docs_agents"}
    exec(blocks("agents.md", "python")[0][1], names)
    (text,) = (text for _, text in blocks("agents.md", "text"))
    shown = [line[8:].replace("⏎", "\n") for line in text.splitlines()]
    tokenizer = qwen_tokenizer()
    chat, runner = ChatFormat(tokenizer, "qwen3"), ToolRunner([names["multiply"]])
    question = [{"role": "user", "content": "What is 12 * 34?"}]
    prompt = Prompt(chat.encode_prompt(question, runner.schemas()), prompt=question)
    turns = [Rollout(tokenizer(turn)["input_ids"], finish_reason="stop") for turn in (shown[1], shown[3])]
    sampler = SimpleNamespace(
        max_length=None,
        is_concurrent=False,
        sample=lambda number, rollouts, limits: [turns[number]],
        raise_together=lambda run: run(),
        any_open=bool,
    )
    try:
        _, [[episode]] = EpisodeLoop(chat, runner, EpisodeLimits()).run(sampler, [prompt], [0], 999, 1)
    finally:
        runner.close()
    tokens = zip(episode.loss_mask, episode.token_ids, strict=True)
    parts = [(trained, [own for _, own in part]) for trained, part in groupby(tokens, lambda token: token[0])]
    assert [trained for trained, _ in parts] == [1, 0, 1]
    assert [tokenizer.decode(own) for _, own in parts] == shown[1:]
    assert tokenizer.decode(prompt.token_ids).endswith(shown[0].removeprefix("... "))


@pytest.mark.parametrize(
    ("page", "line", "fragment"),
    [(page, *block) for page in [*WITH_BLOCKS, "../README.md"] for block in blocks(page, "yaml")],
)
def test_yaml_blocks_parse(page, line, fragment, tmp_path, monkeypatch, capsys):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_rewards.py").write_text("def brevity(completions):\n    return [-len(c) for c in completions]\n")
    (package / "my_engine.py").write_text(
        "from pl_grouprl.rollout import RolloutEngine\n\n\nclass PlainSampler(RolloutEngine):\n    pass\n"
    )
    (package / "my_tools.py").write_text(
        "def multiply(a: int, b: int) -> int:\n    return a * b\n\n\n"
        "class Counter:\n    def reset(self, **row):\n        return None\n"
    )
    first_run = "".join(code for _, code in blocks("first_run.md", "python"))
    (tmp_path / "my_rewards.py").write_text(first_run, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(
        "model:\n  class_path: pl_grouprl.GRPO\n  init_args:\n    policy: tiny\n"
        "    rewards: [{class_path: pl_grouprl.rewards.ExactMatch}]\n"
        "data:\n  class_path: pl_grouprl.PromptDataModule\n  init_args: {train: train.jsonl}\n"
    )
    Path("fragment.yaml").write_text(fragment)
    module = yaml.safe_load(fragment).get("model", {}).get("class_path", "pl_grouprl.GRPO")
    assert config_of(capsys, "base.yaml", "fragment.yaml")["model"]["class_path"] == module


@pytest.mark.parametrize(("page", "count"), [("options.md", 50), ("coming_from_trl_ppo.md", 25)])
def test_options_of_the_tables_exist(page, count):
    options = {**OPTIONS, "model.init_args": OPTIONS["model.init_args"] | parameters(PPO if "ppo" in page else GRPO)}
    paths = [cell for cell in here_cells(page) if cell.startswith(("model.", "data.", "trainer."))]
    assert len(paths) > count
    for path in paths:
        owner, _, name = path.rpartition(".")
        assert name in options[owner], path


def test_every_option_is_on_the_page():
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    for owner in OPTIONS.keys() - {"trainer"}:
        # A longer path that begins with an option counts for it: sampling by sampling.top_p.
        missing = [name for name in OPTIONS[owner] if not re.search(rf"`{re.escape(owner)}\.{name}[.`]", text)]
        assert not missing, owner


def test_import_paths_exist():
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    paths = {path.rstrip(".") for path in re.findall(r"`(pl_grouprl\.[\w.]+)", text)}
    assert len(paths) > 30
    for path in paths:
        pkgutil.resolve_name(path)  # raises where a part of the path does not exist


def test_the_readme_counts_models_as_the_table_does():
    table, readme = (DOCS / "models.md").read_text(), " ".join((DOCS.parent / "README.md").read_text().split())
    exact, refused, skipped = (
        re.search(rf"^## {s}: (\d+)$", table, re.M)[1] for s in ("Exact", "Unsupported", "Not tried")
    )
    assert f"{exact} models are exact, {refused} raise and say why, and {skipped} were not tried" in readme
    assert re.search(r"transformers [\d.]+\d", table)[0] in readme


class Names(Callback):
    """Collects the names of all metrics."""

    def __init__(self):
        self.seen = set()

    def on_train_batch_end(self, trainer, *_):
        self.seen |= set(trainer.callback_metrics)

    on_train_end = on_validation_end = on_train_batch_end


@pytest.mark.parametrize("config", ["grpo_pg", "grpo_qwen3_gsm8k", "ppo", "group_ppo_qwen2.5_gsm8k"])
def test_a_fragment_puts_lora_on_the_policy_of_any_configuration(config, capsys):
    fragment = yaml.safe_load((DOCS.parent / "configs" / "adapter" / "lora.yaml").read_text())
    expected = fragment["model"]["init_args"]
    merged = config_of(capsys, f"{config}.yaml", "adapter/lora.yaml")["model"]["init_args"]
    adapter = merged["policy"]["init_args"]["adapter"]
    assert adapter.items() >= expected["policy"]["init_args"]["adapter"].items()
    assert merged["optimizer"]["learning_rate"] == expected["optimizer"]["learning_rate"]


@pytest.mark.parametrize(
    ("given", "path"), [("q/p", {"path": "q/p"}), ("q/p.gguf", {"path": "q", "gguf_file": "p.gguf"})]
)
def test_a_fragment_puts_lora_on_a_policy_that_is_a_path(given, path, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(f"model: {{init_args: {{policy: {given}}}}}")
    policy = config_of(capsys, "base/grpo.yaml", tmp_path / "mine.yaml", "adapter/lora.yaml")["model"]["init_args"][
        "policy"
    ]
    assert policy["class_path"] == "pl_grouprl.models.PretrainedPolicy"
    assert policy["init_args"].items() >= path.items()
    assert policy["init_args"]["adapter"]["r"] == 32


@pytest.mark.parametrize(
    ("later", "policy"),
    [
        ("{class_path: pl_grouprl.models.PretrainedPolicy, init_args: {path: a}}", {"path": "a", "gguf_file": None}),
        ("a", "a"),
        (None, "q/p.gguf"),
    ],
)
def test_a_later_file_that_sets_no_options_of_a_path_keeps_or_replaces_it(later, policy, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("model: {init_args: {policy: q/p.gguf}}")
    own = "{}" if later is None else f"{{policy: {later}}}"
    (tmp_path / "later.yaml").write_text(f"model: {{init_args: {own}}}")
    found = config_of(capsys, "base/grpo.yaml", tmp_path / "mine.yaml", tmp_path / "later.yaml")
    found = found["model"]["init_args"]["policy"]
    assert found == policy or found["init_args"].items() >= policy.items()


def test_metrics_of_the_table_are_those_that_a_run_logs(tmp_path):
    def graded(data_source, solution_str, ground_truth):
        return {"score": float(len(solution_str)), "letters": len(solution_str)}

    task = MostFrequentDigit(prompt_length=16, train_size=4, val_size=2)
    architecture = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    architecture |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    policy = WarmStartedPolicy(task, architecture, steps=0, cache_dir=str(tmp_path), progress_bar=False)
    module = GRPO(
        policy, [LeadingCorrectCharacters(), graded], num_generations=2, num_iterations=2,
        evaluation={"num_generations": 2}, sampling=SamplingConfig(max_new_tokens=4), beta=0.1,
        policy_loss={"name": "ppo", "delta": 3.0},
    )  # fmt: skip
    names = Names()
    trainer = Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[SharedPrefixCallback(verify=False, measure_every_n_steps=1), names],
    )  # fmt: skip
    data = PromptDataModule(train=task, val=task, batch_size=2)
    trainer.fit(module, data)

    documented = [cell for cell in here_cells("metrics.md") if "LearningRateMonitor" not in cell]
    patterns = [
        re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(cell)).replace("@k", "@[12]")) for cell in documented
    ]
    for pattern, cell in zip(patterns, documented, strict=True):
        assert any(pattern.fullmatch(name) for name in names.seen), cell
    others = {"prefix/groups", "prefix/segments", "prefix/padding_fraction"}  # in shared_prefix.md
    undocumented = {name for name in names.seen if not any(pattern.fullmatch(name) for pattern in patterns)}
    assert undocumented <= others

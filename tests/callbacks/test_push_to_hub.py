"""`ExportPolicy(push_to_hub=...)` against a stand-in of the hub, the card of a run, and `chat`."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from helpers.chat_tokenizers import CHATML, qwen_tokenizer
from helpers.hub_server import TOKEN, serve_hub
from helpers.tiny_models import tiny_model
from huggingface_hub import constants

from pl_grouprl.callbacks import ExportPolicy, RunSummary
from pl_grouprl.callbacks.export_policy import export as export_folder
from pl_grouprl.cli import main
from pl_grouprl.models import LoRAAdapter

IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve_hub() as (hub, url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def export(fit, module, model, *others, **options):
    module.policy = model
    return fit(module, *others, ExportPolicy(tokenizer_attribute=None, **options), max_steps=2)


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_what_was_pushed_can_be_loaded_from_the_hub(hub, fit, counter, tmp_path):
    model = tiny_model("qwen3")
    export(fit, counter, model, push_to_hub="lab/digits", private=True)
    assert hub.private == {"lab/digits": True}
    assert hub.commits == {"lab/digits": ["Counter, step 2"]}
    load = (
        "import torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained('lab/digits')\n"
        f"torch.save(model(torch.tensor({IDS.tolist()})).logits, 'logits.pt')\n"
    )
    environment = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", load], env={**os.environ, **environment}, cwd=tmp_path, check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(IDS).logits)
    card = hub.files["lab/digits"]["README.md"].decode()
    assert 'from_pretrained("lab/digits", dtype="auto")' in card
    assert json.loads(hub.files["lab/digits"]["export.json"])["step"] == 2


def test_a_second_export_replaces_all_files_of_the_first(hub, fit, counter, tmp_path):
    base = tmp_path / "base"
    tiny_model("qwen3").save_pretrained(base)
    export(fit, counter, tiny_model("qwen3"), push_to_hub="digits")
    assert "model.safetensors" in hub.files["somebody/digits"]
    adapted = tiny_model("qwen3").from_pretrained(base)
    LoRAAdapter(r=4).add_to(adapted)
    export(fit, counter, adapted, push_to_hub="digits", adapter="separate", folder="adapter")
    files = hub.files["somebody/digits"]
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    assert "PeftModel.from_pretrained(model," in files["README.md"].decode()
    assert len(hub.commits["somebody/digits"]) == 2


def test_before_training_without_a_token(hub, fit, counter, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(OSError, match="401"):
        export(fit, counter, tiny_model("qwen3"), push_to_hub="lab/digits")
    assert counter.trainer.global_step == 0


def test_before_training_if_others_wrote_to_it(hub, fit, counter):
    hub.private["lab/digits"], hub.commits["lab/digits"] = False, []
    hub.files["lab/digits"] = {"README.md": b"", "model.safetensors": b"theirs"}
    with pytest.raises(FileExistsError, match="push_to_hub 'lab/digits'"):
        export(fit, counter, tiny_model("qwen3"), push_to_hub="lab/digits")
    assert hub.files["lab/digits"]["model.safetensors"] == b"theirs"


def test_before_training_if_everybody_would_see_a_private_policy(hub, fit, counter):
    hub.private["lab/digits"], hub.commits["lab/digits"], hub.files["lab/digits"] = False, [], {}
    with pytest.raises(ValueError, match="private is True, but lab/digits exists with private=False"):
        export(fit, counter, tiny_model("qwen3"), push_to_hub="lab/digits", private=True)
    assert counter.trainer.global_step == 0


def test_the_export_stays_if_the_upload_fails(hub, fit, counter, tmp_path):
    hub.full = True
    with pytest.raises(OSError, match="413"):
        export(fit, counter, tiny_model("qwen3"), push_to_hub="lab/digits")
    assert (tmp_path / "version_0" / "policy" / "model.safetensors").exists()


def test_private_needs_push_to_hub():
    with pytest.raises(ValueError, match="private"):
        ExportPolicy(private=True)


def test_the_card_of_a_run(fit, counter, tmp_path):
    base = tmp_path / "secret folder of somebody" / "base"
    tiny_model("qwen3").save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    server = {"url": "https://somebody:key@host/mcp?key=key", "headers": {"Authorization": "key of somebody"}}
    counter.save_hyperparameters({"tables": str(base), "beta": 0.5, "server": server, "token": "key of somebody"})
    export(fit, counter, tiny_model("qwen3").from_pretrained(base), RunSummary())
    folder = tmp_path / "version_0" / "policy"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pl_grouprl", "reinforcement-learning", "counter"],
        "license": "apache-2.0",
    }
    assert "`base`, trained by Counter for 2 steps." in card
    assert "| `reward` | 1 | 2 | 1 | 2 |" in card
    assert "beta: 0.5" in card
    assert f"torch {torch.__version__}" in card
    assert "somebody" not in card
    assert "server.url: https://host/mcp\n" in card
    assert (folder / "curves.png").read_bytes() == (tmp_path / "version_0" / "curves.png").read_bytes()


def test_a_broken_card_of_the_base_does_not_stop_the_export(fit, counter, tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: [a: b\n---\n")
    export(fit, counter, tiny_model("qwen3").from_pretrained(tmp_path / "base"))
    card = (tmp_path / "version_0" / "policy" / "README.md").read_text(encoding="utf-8")
    assert "The license of the base model applies." in card


def test_the_card_names_base_and_data_on_the_hub(hub, fit, counter):
    hub.private["Org/base"], hub.commits["Org/base"] = False, []
    hub.files["Org/base"] = {"README.md": b"---\nlicense: mit\n---\n"}
    model = tiny_model("qwen3")
    model.config.name_or_path = "Org/base"
    export(fit, counter, model, push_to_hub="lab/digits")
    facts = front_matter(hub.files["lab/digits"]["README.md"].decode())
    assert facts["base_model"] == "Org/base"
    assert facts["base_model_relation"] == "finetune"
    assert facts["license"] == "mit"


def converse(monkeypatch, capsys, lines, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    main(["chat", *arguments])
    return capsys.readouterr().out


@pytest.fixture
def talker(tmp_path):
    """Folder of a policy that a chat template addresses, and its model and tokenizer."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHATML
    model = tiny_model("qwen3", vocab_size=len(tokenizer))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "talker")
    return tmp_path / "talker", model, tokenizer


def answer(model, tokenizer, messages):
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    tokens = model.generate(**ids, max_new_tokens=5, do_sample=False)
    return tokenizer.decode(tokens[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_chat_remembers_until_it_is_cleared(monkeypatch, capsys, talker):
    folder, model, tokenizer = talker
    options = ("--policy", str(folder), "--temperature", "0", "--max_new_tokens", "5")
    said = converse(monkeypatch, capsys, ["one", "two", "/clear", "two"], *options)
    first = [{"role": "user", "content": "one"}]
    reply = answer(model, tokenizer, first)
    again = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": "two"}]
    expected = [reply, answer(model, tokenizer, again), answer(model, tokenizer, [{"role": "user", "content": "two"}])]
    assert expected[1] != expected[2]
    assert [one for one in said.replace("> ", "").splitlines() if one] == [one for one in expected if one]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (("--policy", "/none"), "/none"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--max_new_tokens", "0"), "0"),
    ],
)
def test_chat_ends_with_a_sentence(talker, option, reason):
    with pytest.raises(SystemExit, match=f"no chat: .*{reason}"):
        main(["chat", "--policy", str(talker[0]), *option])


def test_chat_with_an_adapter(monkeypatch, capsys, talker, tmp_path):
    folder, model, tokenizer = talker
    model = type(model).from_pretrained(folder)
    LoRAAdapter(r=4).add_to(model)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.5 * torch.randn_like(parameter)
    export_folder(model, tokenizer, tmp_path / "adapter")
    options = ("--policy", str(tmp_path / "adapter"), "--temperature", "0", "--max_new_tokens", "5")
    said = converse(monkeypatch, capsys, ["one"], *options, "--system", "two")
    messages = [{"role": "system", "content": "two"}, {"role": "user", "content": "one"}]
    assert said.replace("> ", "").strip() == answer(model, tokenizer, messages).strip()

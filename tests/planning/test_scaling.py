"""The prediction of a step on many GPUs: terms worked out by hand, and a published step."""

import json
from pathlib import Path

import pytest
from helpers.quantized import save_policy

from pl_grouprl import GRPO, PromptDataModule, SamplingConfig
from pl_grouprl.cli import RLTrainer, main
from pl_grouprl.planning import Hardware, Rates, plan_run
from pl_grouprl.planning.scaling import Lengths, StepModel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def test_lengths_of_a_mean():
    """Half of the completions go on after each token, up to 3: 1 + 1/2 + 1/4 tokens."""
    lengths = Lengths.of_mean(1.75, 3)
    assert lengths.mean == pytest.approx(1.75)
    assert lengths.longest(1) == pytest.approx(1.75)
    assert lengths.longest(2) == pytest.approx(1 + 3 / 4 + 7 / 16)
    assert Lengths.of_mean(3, 3).longest(5) == 3
    assert Lengths.of_mean(795, 4000).longest(10**6) == pytest.approx(4000)


@pytest.mark.parametrize("mean", [0.5, 4])
def test_an_impossible_mean_is_refused(mean):
    with pytest.raises(ValueError, match="mean_length"):
        Lengths.of_mean(mean, 3)


def test_recorded_lengths(tmp_path):
    """Of two draws from 1 and 3, one of four pairs has no 3."""
    assert Lengths.of_recorded([1, 3]).longest(2) == pytest.approx(2.5)
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(json.dumps({"num_tokens": tokens, "text": "a"}) + "\n" for tokens in (1, 3)))
    assert Lengths.of(Rates(lengths=str(path)), 8).mean == 2


def model(lengths, **options):
    own = {"decode_step": 1.0, "decode_sequence": 0.25, "scoring": 8.0, "update": 40.0, "transfer": 2.0}
    return StepModel(prompts=4, num_generations=2, lengths=lengths, **{**own, **options})


def test_rollouts_are_the_sum_of_their_decoding_steps():
    """On 2 samplers, 4 sequences each; steps of n sequences take 0.75 + n / 4 seconds."""
    assert model(Lengths([1.0] * 10)).rollouts(2) == pytest.approx((10 * 1.75, 0))
    assert model(Lengths([1.0] * 10), max_sequences=2).rollouts(2) == pytest.approx((2 * 10 * 1.25, 0))
    # Half of them have 1 token, half 3: 1 step of 4, and 2 steps of 2, if that is what each sampler got.
    two = model(Lengths.of_recorded([1, 3]))
    work, wait = two.rollouts(2)
    assert work + wait == pytest.approx(1.75 + 2 * 1.25, rel=0.002)  # all 8 have 1 token in one case of 256


def test_groups_stay_whole():
    flat = model(Lengths([1.0]), gradient_bytes=6.0, node=3.0, network=1.0)
    assert flat.training(1) == (8, 40)
    assert flat.training(2) == (4, 20 + 2 * 6 / 2 / 3)
    assert flat.training(3) == (4, 20 + 2 * 6 * 2 / 3 / 3)  # one of three has 2 of 4 prompts
    assert flat.training(16)[0] == flat.training(4)[0] == 2
    assert flat.training(16)[1] == 10 + 2 * 6 * 15 / 16  # across nodes


def test_servers_work_beside_trainers():
    flat = model(Lengths([1.0] * 10), decode_sequence=0.0)  # rollouts take 10 s on any number
    assert flat.predict(4).step == 10 + 2 + 10
    assert flat.predict(4, servers=1).step == 10 + 2 + 10 + 2
    assert flat.predict(4, servers=1, max_staleness=1).step == 12 + 2
    assert flat.predict(1, max_staleness=1).step == 10 + 8 + 40
    across = model(Lengths([1.0]), gradient_bytes=6.0, node=3.0, network=1.0)
    assert across.predict(2, per_node=1).update == 20 + 2 * 6 / 2
    long = model(Lengths.of_recorded([1] * 7 + [81]), decode_sequence=0.0, scoring=0.0)
    first, second = (long.predict(7, 1, k).step for k in (1, 2))
    assert first == pytest.approx(long.lengths.longest(8) + 2)  # no step is shorter than the longest rollout
    assert second == pytest.approx(long.lengths.longest(8) / 2 + 2)


# The plan of a run.


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def zero(completions, **columns):
    return [0.0] * len(completions)


def test_the_model_of_a_run(path):
    sampling = SamplingConfig(max_new_tokens=6)
    module = GRPO(path, zero, sampling=sampling, beta=0.1, num_iterations=2, num_generations=4)
    rows = [{"prompt": "1 2 3 4"}, {"prompt": "1 2"}]
    data = PromptDataModule(train=rows, batch_size=2, tokenizer=module.policy_source.load_tokenizer())
    data.setup("fit")
    rates = Rates(decode_step=0.03, update_mfu=0.25, mean_length=3.0)
    plan = plan_run(module, data, Hardware("bf16-mixed", device="h100"), gpus=(8, 2), servers=(0, 1), rates=rates)
    step = plan.step_model()
    groups = [(length, [3] * 4) for length in plan.workload.prompt_lengths]
    forward = sum(plan.models.cost.of_groups(groups))
    assert step.scoring == pytest.approx(2 * forward / 989e12 / 0.4)  # old and reference log-probabilities
    assert step.update == pytest.approx(2 * 3 * forward / 989e12 / 0.25)
    assert (step.prompts, step.num_generations, step.decode_step, step.own_weights) == (2, 4, 0.03, True)
    assert step.transfer == pytest.approx(2 * plan.models.num_parameters / 3e9)
    rows = [line.split()[:6] for line in str(plan).splitlines() if line.strip().startswith("h100")]
    counts = [["2", "0", "2"], ["2", "1", "3"], ["8", "0", "8"], ["8", "1", "9"]]
    assert rows == [["h100", *count, "ddp", "yes"] for count in counts]
    assert plan.certainty == "partly measured"


def test_rates_of_a_file(tmp_path, capsys):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"rates": {"decode_step": 0.5, "mean_length": 4}}))
    main(
        ["plan", "--config", "grpo_pg.yaml", "--config", str(path), "--device", "h100", "--gpus", "8", "--nodes", "1,2"]
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("h100")]
    (row,) = (row for row in rows if row[1:4] == ["8", "x", "2"])
    assert float(row[13]) == pytest.approx(8 * 0.5, rel=0.01)  # the longest of 256 has all 8 tokens


def test_measured_rates_in_float32(path):
    """They replace all that the data sheet has in 16 bits only."""
    rates = Rates(decode_step=0.03, decode_sequence=1e-3, update_mfu=0.01)
    data = PromptDataModule(train=[{"prompt": "1 2"}], batch_size=1)
    trainer = RLTrainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    found = trainer.plan(GRPO(path, zero), data, device="h100", gpus="8", rates=rates).step_model()
    assert (found.decode_step, found.decode_sequence) == (0.03, 1e-3)


# Published steps of another system, by the page.


def published(mean, prompt=130, parameters=8.03e9, cache=131_072):
    """Llama 3.1 8B, 2,048 rollouts of at most 4,096 tokens, prompts repeated, on H100s at 0.4 of their rates."""
    tokens, peak, bandwidth = 2048 * (mean + prompt), 0.4 * 989e12, 0.4 * 3350e9
    return StepModel(
        prompts=64,
        num_generations=32,
        lengths=Lengths.of_mean(mean, 4096 - prompt),
        decode_step=2 * parameters / bandwidth,
        decode_sequence=2 * parameters / peak + cache * (prompt + mean / 2) / bandwidth,
        scoring=2 * 2 * parameters * tokens / peak,  # policy and reference
        update=6 * parameters * tokens / peak,
        gradient_bytes=4 * 4 * parameters,  # four updates
        transfer=2 * parameters / 3e9,
        own_weights=False,
        node=300e9,
        network=50e9,
    )


@pytest.mark.parametrize(
    ("mean", "gpus", "staleness", "found", "too_long"),
    [(795, 8, 0, 112, 7), (1060, 16, 0, 97.7, 5), (1129, 16, 1, 74.6, 12), (1123, 16, 1, 64.8, 29)],
)
def test_published_steps_are_as_far_off_as_the_page_says(mean, gpus, staleness, found, too_long):
    text = PAGE.read_text(encoding="utf-8")
    divided = [(gpus, 0)] if not staleness else [(gpus - servers, servers) for servers in range(1, gpus)]
    times = min((published(mean).predict(*own, staleness) for own in divided), key=lambda times: times.step)
    parts = times.rollouts + times.longest, times.scoring, times.update, times.transfer
    assert f"| predicted | {' | '.join(f'{part:.0f}' for part in parts)} | **{times.step:.0f}** |" in text
    assert 100 * (times.step / found - 1) == pytest.approx(too_long, abs=0.5)

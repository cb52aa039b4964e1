"""The monitor in a module that is none of ours, and its metrics over batches and ranks."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from lightning.pytorch import LightningModule

from pl_grouprl.callbacks.token_groups import CompressionRatio, TokenGroupMonitor, TokenGroupStatistics
from pl_grouprl.functional.token_groups import find_token_groups

TWO_RANKS = Path(__file__).with_name("token_group_ranks.py")


def constant_groups(length, threshold):
    """One row, constant delta: groups of ceil(threshold) tokens."""
    ones = torch.ones(1, length)
    return find_token_groups(ones, ones, ones.bool(), threshold=threshold)


class Foreign(LightningModule):
    """Somebody's module: batch i has i + 1 times 6 tokens in groups of 3; how it hands them over is up to the test."""

    def __init__(self, hand_over="outputs", threshold=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.hand_over = hand_over
        self.same = constant_groups(6, 3.0)
        if threshold is not None:
            self.token_group_threshold = threshold

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        groups = constant_groups(6 * (batch_idx + 1), 3.0)
        if self.hand_over == "attribute":
            self.token_groups = groups
            return loss
        handed = {
            "outputs": {"token_groups": groups, "token_group_threshold": 3.0},
            "list": {"token_groups": [groups, constant_groups(2, 3.0)]},
            "other name": {"cuts": groups},
            "none": {"token_groups": None},
            "same": {"token_groups": self.same},
            "nothing": {},
            "no step": None,
        }[self.hand_over]
        return None if handed is None else {"loss": loss, **handed}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def rows_of(tmp_path):
    with (tmp_path / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def fit_once(fit, module, *callbacks, **options):
    return fit(module, *callbacks, **{"max_steps": 2, "limit_val_batches": 0, **options})


def test_figures_of_a_foreign_module_reach_its_logger(fit, tmp_path):
    trainer = fit_once(fit, Foreign(), TokenGroupMonitor())
    first, second = rows_of(tmp_path)
    expected = {
        "total_tokens": 6, "advantage_positions": 2, "compression_ratio": 2 / 3, "speedup_factor": 3,
        "avg_group_size": 3, "threshold": 3, "ended_by_variance": 1, "ended_by_size": 0, "ended_by_last": 0,
    }  # fmt: skip
    logged = {name for name in first if name.startswith("token_group/")}
    assert logged == {f"token_group/{name}" for name in expected}
    for name, value in expected.items():
        assert float(first[f"token_group/{name}"]) == pytest.approx(value), name
    assert float(second["token_group/total_tokens"]) == 12
    assert trainer.callback_metrics["token_group/advantage_positions"].item() == 4


def test_groups_and_threshold_from_attributes_and_other_names(fit):
    trainer = fit_once(fit, Foreign("attribute", threshold=torch.tensor(2.5)), TokenGroupMonitor())
    assert trainer.callback_metrics["token_group/total_tokens"].item() == 12
    assert trainer.callback_metrics["token_group/threshold"].item() == 2.5
    trainer = fit_once(fit, Foreign("list"), TokenGroupMonitor(), max_steps=1)
    # 6 tokens in two groups of 3, and 2 tokens that the end cuts.
    assert trainer.callback_metrics["token_group/compression_ratio"].item() == pytest.approx(1 - 3 / 8)
    assert trainer.callback_metrics["token_group/ended_by_last"].item() == pytest.approx(1 / 3)
    assert "token_group/threshold" not in trainer.callback_metrics
    trainer = fit_once(fit, Foreign("other name"), TokenGroupMonitor(groups_key="cuts"), max_steps=1)
    assert trainer.callback_metrics["token_group/total_tokens"].item() == 6


@pytest.mark.parametrize(("hand_over", "totals"), [("outputs", [6 + 12, 18 + 24]), ("same", [6, 6])])
def test_micro_batches_of_a_step_are_added_up_and_the_same_groups_count_once(fit, tmp_path, hand_over, totals):
    fit_once(fit, Foreign(hand_over), TokenGroupMonitor(), accumulate_grad_batches=2)
    assert [float(row["token_group/total_tokens"]) for row in rows_of(tmp_path)] == totals


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
@pytest.mark.filterwarnings("error:.*called before the ``update`` method")
@pytest.mark.parametrize("hand_over", ["none", "no step"])
def test_a_batch_without_groups_counts_nothing(fit, hand_over):
    trainer = fit_once(fit, Foreign(hand_over), TokenGroupMonitor())
    figures = {name: value.item() for name, value in trainer.callback_metrics.items() if "token_group/" in name}
    assert figures == {"token_group/total_tokens": 0, "token_group/advantage_positions": 0}


def test_no_groups_at_all_is_an_error_that_says_what_to_provide(fit):
    with pytest.raises(ValueError, match="groups_key"):
        fit_once(fit, Foreign("nothing"), TokenGroupMonitor())


def test_metrics_add_up_before_they_divide():
    statistics, ratio = TokenGroupStatistics(), CompressionRatio()
    for groups in (constant_groups(8, 1.0), constant_groups(24, 4.0)):
        statistics.update(groups)
        ratio.update(groups)
    # 8 + 6 endpoints of 32 tokens; the mean of the two ratios would be 0.375.
    assert ratio.compute().item() == pytest.approx(1 - 14 / 32)
    figures = statistics.compute()
    assert figures["token_group/compression_ratio"].item() == pytest.approx(1 - 14 / 32)
    assert figures["token_group/avg_group_size"].item() == pytest.approx(32 / 14)
    statistics.reset()
    statistics.update(constant_groups(4, 4.0), torch.tensor([[True, True, True, False]]))
    assert statistics.compute()["token_group/total_tokens"].item() == 3
    assert "threshold" not in "".join(figures)


def test_metrics_resume_from_their_state():
    whole, first, second = (TokenGroupStatistics() for _ in range(3))
    for metric in (whole, first):
        metric.update(constant_groups(10, 3.0))
    second.load_state_dict(first.state_dict())
    for metric in (whole, second):
        metric.update(constant_groups(9, 2.0))
    assert second.compute() == whole.compute()


def test_groups_without_causes_have_no_shares_by_cause():
    statistics = TokenGroupStatistics(prefix="")
    statistics.update(constant_groups(6, 2.0)._replace(causes=None))
    assert set(statistics.compute()) == {
        "total_tokens", "advantage_positions", "compression_ratio", "speedup_factor", "avg_group_size"
    }  # fmt: skip


def test_two_ranks_log_the_ratio_of_sums(tmp_path):
    run_script(TWO_RANKS, tmp_path, ranks=2, cwd=tmp_path)
    for rank in (0, 1):
        figures = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        # 8 endpoints of 8 tokens on one rank, 6 of 24 on the other.
        assert figures["token_group/total_tokens"] == 32
        assert figures["token_group/advantage_positions"] == 14
        assert figures["token_group/compression_ratio"] == pytest.approx(1 - 14 / 32)
        assert figures["token_group/ended_by_variance"] == 1
        assert figures["metric"] == pytest.approx(1 - 14 / 32)

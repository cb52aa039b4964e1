"""The default run and the callback need no module or call that macOS or Windows lacks.

Neither system has run this: `helpers.other_systems` takes away from Linux what they lack.
"""

from pathlib import Path

import pytest
from helpers.cli_runs import TASK, warm_started
from helpers.scripts import run_script
from helpers.sweeps import sweep
from helpers.versions import needs

from pl_grouprl.utilities.checkpoint_files import corruption_reason

POLICY = warm_started("%(folder)s").replace(", progress_bar: false", "")
SMALL = f"""
model: {{init_args: {{policy: {POLICY}, num_generations: 2, sampling: {{max_new_tokens: 2}}}}}}
data: {{init_args: {{train: {TASK}, val: {TASK}, test: {TASK}, batch_size: 2}}}}
trainer: {{max_steps: 2, val_check_interval: 2}}
"""


@needs("deepspeed", "0.19.8")  # earlier ones compile something when they are imported
@pytest.mark.parametrize("system", sweep(["darwin", "win32"], quick=["win32"]))
def test_default_run_and_callback(system, tmp_path):
    small = tmp_path / "small.yaml"
    small.write_text(SMALL % {"folder": tmp_path}, encoding="utf-8")
    arguments = ["fit", "--config", "grpo_pg.yaml", "--config", small]
    script = Path(__file__).with_name("other_system.py")
    done = run_script(script, system, tmp_path / "callback", *arguments, cwd=tmp_path, timeout=600)
    # Four rows of 40 tokens, of which 32 are the same: 160 tokens with repeated prefixes, 64 without.
    assert "token ratio 2.5" in done.stdout
    (run,) = (tmp_path / "runs" / "grpo_pg").iterdir()
    last = run / "checkpoints" / "last.ckpt"
    assert last.is_symlink() == (system == "darwin")
    assert corruption_reason(last) is None
    assert {"metrics.csv", "summary.json"} <= {path.name for path in run.iterdir()}

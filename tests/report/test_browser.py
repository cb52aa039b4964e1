"""The page in a real browser; `apt-get install chromium` provides one."""

import shutil
import subprocess

import matplotlib.image
import pytest
from helpers.recorded_runs import COMPLETIONS, recorded

from pl_grouprl.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_the_page_without_a_network(tmp_path):
    page = write_report([recorded("a", completions=COMPLETIONS), recorded("b", reward=0.25)], tmp_path / "page.html")
    picture = tmp_path / "page.png"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1400,1400", f"--screenshot={picture}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    assert pixels.shape[:2] == (1400, 1400)
    for color in ("#2563eb", "#e8590c"):  # the lines of both runs
        wanted = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        assert (abs(pixels - wanted).max(axis=-1) < 0.01).sum() > 100

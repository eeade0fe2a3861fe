"""What a person sees: TensorBoard in a real browser. Screenshots lie in ``build/screenshots``."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from comparison import Run
from project.tracking.charts import page_url

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"
QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian package chromium)"),
]


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """A running TensorBoard's address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"http://localhost:\d+/", line):
                yield found.group()
                return
        pytest.fail("".join(said))
    finally:
        server.terminate()
        server.communicate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Any, address: str, name: str) -> Iterator[Any]:
    """A page, of which a picture is kept."""
    page = browser.new_page(viewport={"width": 1600, "height": 1200})
    page.set_default_timeout(60_000)
    try:
        page.goto(f"{address.partition('#')[0]}#{name}")
        yield page
    finally:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")
        page.close()


def test_a_run_of_two_ranks_shows_both_and_its_diagnosis(run: Run, browser: Any) -> None:
    folder, _ = run(*QUIET, "trainer.devices=2", "callbacks.tracker.interval_s=0.2", "trainer.max_epochs=10")
    with tensorboard(folder / "tensorboard") as address:
        with opened(browser, address, "custom_scalars") as page:
            chart = page.locator("tf-custom-scalar-multi-line-chart-card").filter(has_text="samples per second")
            chart.get_by_text("Matches (3)").wait_for()  # all, and each rank
            for of_run in ("all", "rank_000", "rank_001"):
                page.get_by_text(of_run, exact=True).first.wait_for()
            lines = chart.locator("path.line")
            lines.first.wait_for(state="attached")
            colors = {line.evaluate("line => getComputedStyle(line).stroke") for line in lines.all()}
            assert len(colors) >= 3
            page.wait_for_timeout(1500)  # the curves glide to their places
        with opened(browser, page_url(int(address.rstrip("/").rpartition(":")[2])), "timeseries") as page:
            pinned = page.locator("metrics-pinned-view")
            for tag in ("train/loss", "speed/samples_per_s"):
                pinned.get_by_text(tag.partition("/")[2], exact=False).first.wait_for()
        with opened(browser, address, "text") as page:
            page.get_by_text("diagnosis/text_summary").first.wait_for()
            page.get_by_text(re.compile("bound by ")).first.wait_for()
            page.get_by_text("part of a step (ms)").first.wait_for()
        with opened(browser, address, "hparams") as page:
            page.get_by_text("data.batch_size").first.wait_for()
            page.get_by_text("MLP").first.wait_for()


def test_a_sweep_shows_its_jobs_by_what_it_varies(run_cli: Any, browser: Any, tmp_path: Path) -> None:
    result = run_cli("train", *QUIET, "debug=fast", "-m", "optimizer.lr=0.01,0.002", timeout_s=200)
    assert result.returncode == 0, result.stderr
    (sweep,) = tmp_path.glob("outputs/*/sweep_*")
    with tensorboard(sweep) as address, opened(browser, address, "hparams") as page:
        page.get_by_text("optimizer.lr").first.wait_for()
        for rate in ("0.01", "0.002"):
            page.get_by_text(re.compile(rf"^\s*{re.escape(rate)}0*\s*$")).first.wait_for()
        for not_varied in ("data.batch_size", "model.net.width", "hp_metric"):
            assert page.get_by_text(not_varied).count() == 0

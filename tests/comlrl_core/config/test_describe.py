"""The settings reference is made from the fields, and the page in docs/ is the one that the fields give."""

from pathlib import Path

from comlrl_core.algorithms.madpo_config import MADPOIterConfig
from comlrl_core.config.describe import settings_markdown


def test_the_page_in_docs_is_current() -> None:
    page = (Path(__file__).parents[3] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_markdown() + "\n", "run `comlrl settings > docs/settings.md`"


def test_every_setting_of_the_default_algorithm_is_there_with_its_bounds() -> None:
    page = settings_markdown()
    for name in MADPOIterConfig.model_fields:
        assert f"| `{name}` |" in page
    assert "| `dpo_beta` | `0.1` | number, > 0.0, <= 10000.0 |" in page
    assert "`current`, `nearest_k`, `all_history`, `lambda_decay`" in page

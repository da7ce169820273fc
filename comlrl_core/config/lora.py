"""Low-rank adapters (arXiv 2106.09685) in place of whole models."""

from pydantic import Field

from comlrl_core.config.base import Settings


class LoraSettings(Settings):
    """What each agent trains: a small adapter; the base model stays as it is."""

    r: int = Field(8, ge=1, le=4096, description="Rank of an adapter's matrices.")
    alpha: float = Field(16.0, gt=0.0, description="An adapter's output is scaled by alpha / r.")
    dropout: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Written into the adapters' configuration for other tools; updates here run without any dropout.",
    )
    targets: list[str] | str | None = Field(
        None,
        description="Names of the layers that get an adapter, or `all-linear`; null = the model's usual ones.",
    )
    share_base: bool = Field(
        True, description="All agents' adapters on one copy of the base model; false: a copy for each agent."
    )

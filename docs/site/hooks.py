"""What MkDocs does with each page: its link for editing leads to the file that the page was made of."""

from __future__ import annotations

from typing import Any


def on_page_context(context: dict[str, Any], page: Any, config: Any, nav: Any) -> dict[str, Any]:
    """Replace the link, which MkDocs makes of the folder with the pages."""
    source = page.meta.get("source")
    page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/{source}" if config.repo_url and source else None
    return context

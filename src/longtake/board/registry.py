"""The functions that render a run's pages, by the pages' names in URLs."""

from collections.abc import Callable, Mapping
from typing import Final

from longtake.board import data_page, nodes_page, overview, plan_page, samples_page
from longtake.board.pages import PageLinks, PageName
from longtake.inspection.reader import RunFacts

Render = Callable[[RunFacts, PageLinks, Mapping[str, str]], str]

RENDER: Final[dict[PageName, Render]] = {
    "overview": overview.render_overview,
    "samples": samples_page.render_samples,
    "data": data_page.render_data,
    "nodes": nodes_page.render_nodes,
    "plan": plan_page.render_plan,
}
"""Functions that render a page to HTML, by page: from facts of a run, links and the URL's query."""

"""How Sphinx builds these pages: `sphinx-build -W docs docs/_build/html`."""

from __future__ import annotations

import batchfinder

project = "batchfinder"
author = "the batchfinder developers"
copyright = "2026, the batchfinder developers"
release = version = batchfinder.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"batchfinder {release}"

"""Sphinx configuration: Furo, MyST, and the API pages from docstrings. Build: see CONTRIBUTING.md."""

from __future__ import annotations

from flashdreams import __version__

project = "flashdreams"
author = "the flashdreams authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]
html_theme = "furo"
html_title = f"flashdreams {release}"
html_static_path = ["_static"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True, "ignore-module-all": True}
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

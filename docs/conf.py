"""Settings of the documentation site, which `make docs` builds from the whole repository.

The source directory is the root of the repository, so that its pages link to each other on the site
as they do in a checkout. A new page needs an entry in docs/index.md, the front page in place of
README.md.
"""

from docutils import nodes
from docutils.utils.math import latex2mathml

import vim_mm

project = 'vim_mm'
author = 'the vim_mm authors'
release = version = vim_mm.__version__

root_doc = 'docs/index'
include_patterns = [
    '*.md',
    'docs/**',
    'seg/*.md',
    'det/*.md',
    'demo/*.md',
    'studies/**/*.md',
    'requirements/*.md',
]
exclude_patterns = [
    'README.md',
    'docs/site',
    'docs/snippets',
    'docs/_static',
    '.*',
    'data',
    'work_dirs',
    'build',
]
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']

# As on GitHub, page.md#a-heading leads to the heading.
myst_heading_anchors = 4
myst_enable_extensions = ['dollarmath']

autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # the docstrings give types, and shapes with them
napoleon_use_rtype = False
napoleon_use_ivar = True

# A reference to a public name, vim_mm.name or vim_mm.room.name, must have a target on the page of
# the API. Others have none: modules below the rooms are not on it, the build has no network for
# other libraries, and Napoleon takes the words of an `Args:` line for names.
nitpicky = True
nitpick_ignore_regex = [
    ('py:mod', '.*'),
    ('py:.*', r'(?!vim_mm(\.\w+){1,2}$).*'),
    ('py:class', r'vim_mm\.(Vision)?Mamba'),  # they stand under vim_mm.models
]

html_theme = 'furo'
html_title = f'vim_mm {release}'
html_static_path = ['_static']
html_css_files = ['site.css']
html_extra_path = ['site']  # the front page of the site, which leads to docs/index.html
html_show_copyright = False


def _as_mathml(visitor, node):
    block = isinstance(node, nodes.math_block)
    mathml = latex2mathml.tex2mathml(node.astext(), as_block=block)
    visitor.body.append(f'<div class="math">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def setup(app):
    """Formulas as MathML, which browsers draw by themselves: no script from a network."""
    app.add_html_math_renderer('mathml', (_as_mathml, None), (_as_mathml, None))


html_math_renderer = 'mathml'

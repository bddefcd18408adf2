"""Write a page about a laboratory's experiments in Markdown: question, command, table and picture of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerofit.spec.files import write_text
from zerofit.spec.local_machine import versions

PAGE = """# {{ title }}

Made with {{ versions }}. The command below each question answers only that question. Each page has more columns.
{% for one in sections %}
## {{ one.question }}

```bash
{{ one.command }}
```

| {{ one.columns | join(" | ") }} |
|{{ "---|" * (one.columns | length) }}
{% for row in one.rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
{%- if one.missing %}
No figures (the reasons are among the figures below): `{{ one.missing | map("first") | join("`, `") }}`
{% endif %}
![{{ one.question }}]({{ one.folder.relative_to(home) }}/comparison.png)

[page]({{ one.folder.relative_to(home) }}/comparison.html), [figures]({{ one.folder.relative_to(home) }}/results.json)
{% endfor %}"""


class Section(NamedTuple):
    """One experiment."""

    question: str
    command: str
    folder: Path  # with its comparison
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    missing: Sequence[tuple[str, str]]  # name and reason of each row without figures


def write_laboratory(folder: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write README.md, which shows the pictures from the experiments' folders; return its path."""
    from jinja2 import Environment

    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    text = Environment(keep_trailing_newline=True).from_string(PAGE)
    path = folder / "README.md"
    write_text(path, text.render(title=title, versions=used, sections=sections, home=folder))
    return path

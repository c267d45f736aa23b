"""Links of docs/ to files of the repository, as links of the site: mkdocs calls this, see mkdocs.yml.

Pages link to files outside of docs/, such as benchmarks/README.md, by relative paths, which hold where the repository
is read. The site gets a copy of each such file under `repository/`, and the links lead there.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
COPIES = "repository"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """The files of the site, and those of the repository that they link to."""
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            target = _repository_path(page.src_uri, link)
            copy = f"{COPIES}/{target}"
            if not target.startswith("docs/") and (ROOT / target).is_file() and copy not in files.src_uris:
                file = File.generated(config, copy, abs_src_path=str(ROOT / target))
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """A page whose links to files of the repository lead to their copies, and those of a copy to pages of docs/."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        target = _repository_path(here, match[1])
        of_site = target.removeprefix("docs/") if target.startswith("docs/") else f"{COPIES}/{target}"
        return posixpath.relpath(of_site, posixpath.dirname(here)) if of_site in files.src_uris else match[1]

    return LINK.sub(moved, markdown)


def _repository_path(page: str, link: str) -> str:
    """Where a link of a file of the site leads in the repository."""
    place = page.removeprefix(f"{COPIES}/") if page.startswith(f"{COPIES}/") else f"docs/{page}"
    return os.path.normpath(posixpath.join(posixpath.dirname(place), link))

"""Builds the documentation site: `python docs/site/build.py`, or `make docs`. It needs the extra `docs`.

    python docs/site/build.py                     with all tutorials run anew, so that their views are live pages: minutes
    python docs/site/build.py --live 02 13        only these; the others show the pictures that their notebooks hold
    python docs/site/build.py --live none         none
    python docs/site/build.py --out FOLDER        where the site goes; default build/site

The site's address is SITE_URL of the environment, or `Documentation` among [project.urls] of pyproject.toml; that of the
repository is REPO_URL, or `Repository` there. With the first, the site has a map, and a page for wrong addresses that works
in any folder of a server; with the second, each page has a link for editing, and the reference links to the source. Without
them there is no map, the page for wrong addresses works at a server's root alone, and files are named without links.

Nothing is written twice: pages are made of the README's sections, the files in docs/, the notebooks, the registry of
optimizers and the docstrings, into a folder next to the site's, from which MkDocs makes the site. Look at it by
`python -m http.server --bind 127.0.0.1 --directory build/site`: search needs a server, everything else works from the disk,
and nothing needs a network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gallery_page
import optimizer_pages
import reference_pages
import text_pages
import tutorial_pages
import yaml

import tristep

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", nargs="+", default=["all"], metavar="NN", help="numbers of tutorials to run; all or none")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder of the site")
    parser.add_argument("--optimizers", nargs="+", metavar="NAME", help="race pictures of these only")
    arguments = parser.parse_args()
    build(arguments.live, arguments.out, arguments.optimizers)
    print(f"written: {arguments.out}")


def build(live: list[str], out: Path, raced: list[str] | None = None) -> None:
    """Write the pages, and let MkDocs make the site of them; what it warns of is an error."""
    out = out.resolve()
    pages = out.with_name(f"{out.name}-pages")
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    site, repository = addresses()
    contents = text_pages.write(ROOT, pages)
    contents["Home"].append({"All views": gallery_page.write(ROOT / "tutorials", pages)})
    contents["Tutorials"] = tutorial_pages.write(ROOT / "tutorials", pages, live)
    contents["Optimizers"] = optimizer_pages.write(ROOT, pages, raced)
    contents["Reference"] = reference_pages.write(ROOT, pages, repository)
    (pages / "files").mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("site.css"), pages / "files" / "site.css")
    settings = settings_of(pages, contents, site, repository)
    configuration = pages.with_suffix(".yml")
    configuration.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--clean"]
    subprocess.run([*command, "--config-file", str(configuration), "--site-dir", str(out)], check=True, cwd=ROOT)
    if site is None:  # a map names pages by their addresses
        for path in out.glob("sitemap.xml*"):
            path.unlink()


def addresses() -> tuple[str | None, str | None]:
    """The addresses of the site and of the repository, each None if nobody has said it."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    site = os.environ.get("SITE_URL") or urls.get("Documentation")
    repository = os.environ.get("REPO_URL") or urls.get("Repository")
    return (f"{site.rstrip('/')}/" if site else None), (repository.rstrip("/").removesuffix(".git") if repository else None)


def settings_of(pages: Path, contents: dict[str, Any], site: str | None, repository: str | None) -> dict[str, Any]:
    """What MkDocs is told: mkdocs.yml, and what is known only here."""
    settings: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("mkdocs.yml").read_text(encoding="utf-8"))
    settings |= {"docs_dir": str(pages), "nav": [{title: chapter} for title, chapter in contents.items()]}
    settings |= {"site_name": f"{settings['site_name']} {tristep.__version__}"}
    settings |= {"hooks": [str(Path(__file__).with_name("hooks.py"))]}
    settings |= {name: address for name, address in (("site_url", site), ("repo_url", repository)) if address}
    settings["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    return settings


if __name__ == "__main__":
    main()

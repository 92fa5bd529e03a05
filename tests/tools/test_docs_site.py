"""The documentation's site: every page is built, no link is broken, and a page loads nothing from elsewhere."""

import re

import docs_site


def test_a_link_to_a_file_makes_it_a_page_and_others_do_not() -> None:
    found = {path.relative_to(docs_site.ROOT).as_posix() for path in docs_site.pages_and_images()}
    assert {
        "README.md",
        "docs/api.md",
        "docs/playground.png",
        "bench/RESULTS.md",
        "bench/plots/ttft-slow-wire.svg",
    } <= found
    assert not [name for name in found if name.endswith((".py", ".sh"))]


def test_the_site_is_whole_and_loads_nothing_from_elsewhere() -> None:
    assert docs_site.main() == 0  # with --strict a broken link is an error
    site = docs_site.ROOT / "build" / "site"
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {
        "index.html",
        "docs/api.html",
        "docs/architecture.html",
        "bench/RESULTS.html",
        "CONTRIBUTING.html",
    } <= pages.keys()
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?=\"?([^\"\s>]+)", page)
        loaded += re.findall(r"<link\b[^>]*\brel=\"?stylesheet\"?[^>]*\bhref=\"?([^\"\s>]+)", page)
        assert loaded and not [address for address in loaded if "//" in address], name

"""What a scrape has found, read by the library's own parser."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

LIMIT_S = 20
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""To this machine, whatever proxies are set."""


class Scraped:
    """The samples of a text."""

    def __init__(self, text):
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name: family.type for family in families}
        assert all(family.documentation for family in families)
        self.samples = [sample for family in families for sample in family.samples]

    def value(self, name, **labels):
        """Of the one sample of this name that has these labels, whatever others it has."""
        found = [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels, found)
        return found[0].value

    def by(self, label, name):
        """By the label's value those of this name."""
        found = [(s.labels[label], s.value) for s in self.samples if s.name == name]
        assert len(dict(found)) == len(found), found
        return dict(found)

    def sum(self, name):
        return sum(s.value for s in self.samples if s.name == name)


def scrape(url):
    with DIRECT.open(url, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return Scraped(answer.read().decode())

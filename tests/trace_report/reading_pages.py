"""A page as a browser reads it, by the standard library's parser: with no tag left open, and nothing to be fetched."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}
OF_ADDRESSES = {"src", "href", "xlink:href", "action", "formaction", "poster", "data", "srcset", "background"}


class Page(HTMLParser):
    """What is in a page.

    Attributes:
        tables: By id, rows of the text of their cells.
        text: All of it, but for styles.
        tags: Each that was opened.
        ids: Each that was given.
    """

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tables, self.tags, self.ids, self._open, self._parts = {}, [], [], [], []
        self._table = self._cell = None
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"
        self.text = "".join(self._parts)

    def handle_starttag(self, tag, attrs):
        self._note(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._table = self.tables.setdefault(dict(attrs)["id"], [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag, attrs):
        self._note(tag, attrs)

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> within {self._open[-3:]}"
        self._open.pop()
        if tag in ("td", "th"):
            self._table[-1].append("".join(self._cell).strip())
            self._cell = None

    def handle_data(self, data):
        if "style" in self._open[-1:]:
            check_style(data)
        else:
            self._parts.append(data)
        if self._cell is not None:
            self._cell.append(data)

    def _note(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.tags.append(tag)
        for name, value in attrs:
            check_style(value or "")
            assert not name.startswith("on"), f"<{tag}> does something: {name}={value}"
            if name in OF_ADDRESSES:
                assert (value or "").startswith(("#", "data:image/png;base64,")), f"<{tag}> fetches {name}={value}"
            if name == "id":
                self.ids.append(value)


def check_style(text):
    """What styles refer to is in the page itself."""
    assert "@import" not in text and "url(" not in text.replace("url(#", ""), text


def read(text):
    """A page that stands for itself."""
    page = Page(text)
    assert "script" not in page.tags and "iframe" not in page.tags and "link" not in page.tags
    assert len(page.ids) == len(set(page.ids)), sorted(one for one in page.ids if page.ids.count(one) > 1)
    return page

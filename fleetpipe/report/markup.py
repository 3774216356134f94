"""Elements of HTML as values: whatever text they are given is escaped when they are written."""

from __future__ import annotations

import json
from typing import Union
from xml.etree import ElementTree

Element = ElementTree.Element
Child = Union[Element, str, None]


def element(tag: str, *children: Child, **attributes: object) -> Element:
    """Returns an element.

    Args:
        tag: Its name.
        children: Elements and text, in order; None is left out.
        attributes: By name; ``class_`` and ``for_`` lose the underscore, others have hyphens for
            theirs. None is left out.
    """
    made = ElementTree.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), str(value))
    for child in children:
        _append(made, child)
    return made


def data(value: object) -> Element:
    """Returns values for the page's script, which nothing else runs or shows.

    The text of a script is not escaped in HTML: no ``<`` may stand in it.
    """
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return element("script", text, type="application/json")


def written(root: Element) -> str:
    """Returns the text of a whole page."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html")


def _append(parent: Element, child: Child) -> None:
    if child is None:
        return
    if not isinstance(child, str):
        parent.append(child)
    elif len(parent):
        parent[-1].tail = (parent[-1].tail or "") + child
    else:
        parent.text = (parent.text or "") + child

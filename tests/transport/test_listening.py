"""What of the package others can connect to: the ranks' mesh, Paddle's store, and ``--serve``."""

from __future__ import annotations

import ast

import pytest

from tests.check_types import ROOT, sources, tree

pytestmark = pytest.mark.no_paddle

#: Calls after which somebody may connect. To bind a port alone only shows that it is free.
LISTENS = {
    *("listen", "create_server", "start_server", "create_unix_server", "Listener"),
    *("TCPStore", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "serve_forever", "KVServer"),
}


def test_nothing_else_listens() -> None:
    found = set()
    for file in sources(ROOT):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in LISTENS:
                    found.add((str(file.relative_to(ROOT)), name))
    assert found == {
        ("fleetpipe/transport/joining/hosts.py", "listen"),
        ("fleetpipe/transport/joining/hosts.py", "Listener"),  # what it returns
        ("fleetpipe/paddle_api/gloo/stores.py", "TCPStore"),
        ("fleetpipe/contrib/view/showing/server.py", "start_server"),  # where it is asked for
    }

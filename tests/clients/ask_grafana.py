"""A board, as JSON on stdin, read into Grafana's own types and written again; and the types that its parts were."""

from __future__ import annotations

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel


def main() -> None:
    register_default_plugins()
    board = Dashboard.from_json(json.load(sys.stdin))
    panels = [panel for panel in board.panels or [] if isinstance(panel, Panel)]
    parts = [part for panel in panels for part in (panel.options, *(panel.targets or []))]
    written = json.loads(json.dumps(board, cls=JSONEncoder))
    print(json.dumps({"board": written, "types": [type(part).__module__ for part in parts]}))


if __name__ == "__main__":
    main()

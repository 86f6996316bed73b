"""The status page that the router's HTTP port serves at `/`: fleet, requests and rounds, live,
and what is wrong with them.

figures.py                 Figures and curves of the page, computed from samples of the metrics.
problems.py                List of what is wrong, in words, with what to do about it.
routes.py                  Routes of the status page: static files, and the router's state in
                           `/status.json`.
snapshot.py                Snapshot of the router's state as plain data, for the status page.
speculation_text.py        Sentences that tell how the fleet speculates, and why.
"""

from outrider_router.api.status_page.routes import status_router
from outrider_router.api.status_page.snapshot import make_snapshot

__all__ = ["make_snapshot", "status_router"]

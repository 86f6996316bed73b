"""The page that the router's HTTP port serves at `/`: fleet, requests and rounds, live.

Parts:
    snapshot    the router's state as JSON
    routes      the page, its two files and `/status.json`
    static/     HTML, CSS and JavaScript as they are served; no build step, nothing from elsewhere

routes.py                  Routes of the status page.
snapshot.py                Snapshot of the router's state as JSON.
"""

from outrider_router.api.status_page.routes import status_router
from outrider_router.api.status_page.snapshot import make_snapshot

__all__ = ["make_snapshot", "status_router"]

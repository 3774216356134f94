"""``fleetpipe report``: the folder of a run as one page of HTML that needs nothing else.

``files.py`` says what stands in such a folder: callbacks and the launcher write it. ``run.py``
reads it, whatever is missing or torn; ``page.py`` computes what ``templates/page.html`` shows, and
is where to start. No Paddle is needed. It imports schedules; the training loop and the launcher
import ``files.py``.
"""

"""``fleetpipe report``: the folder of a run as one page of HTML that needs nothing else.

``job/run_files.py`` names the files of such a folder: callbacks and the launcher write them.
``run.py`` reads it, whatever is missing or torn; ``page.py`` computes what ``templates/page.html``
shows, and is where to start. No Paddle is needed.
"""

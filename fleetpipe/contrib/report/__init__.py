"""``fleetpipe report``: the folder of a run as one page of HTML that needs nothing else.

``job/run_files.py`` names the files of such a folder: callbacks and the launcher write them.
``run.py`` reads it, even if files are missing or torn; ``page.py`` computes the contents of
``templates/page.html``; start there. No Paddle is needed.
"""

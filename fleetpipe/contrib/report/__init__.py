"""``fleetpipe report``: the folder of a run as one page of HTML that needs nothing else.

``job/run_files.py`` names the files of such a folder: callbacks and the launcher write them.
``run_contents.py`` reads it, even if files are missing or torn; ``page.py`` computes the parts of
``templates/page.html``; start there. No Paddle is needed.
"""

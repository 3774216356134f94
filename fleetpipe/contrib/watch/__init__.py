"""A job while it runs: what its ranks tell, which of them is slow, and who may look at it.

``job/records.py`` has what each rank says of itself; ``board.py`` puts that together to the state
of the job, and ``slow_ranks.py`` names the slow ones: these compute alone. ``server.py`` and
``command.py`` show a board. No Paddle is needed: ``job`` sends the records, the launcher serves.
"""

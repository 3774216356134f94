"""The engine: walks a plan, action by action, and knows neither graph modes nor jobs.

Start with ``engine.py``. ``fleetpipe.dygraph`` and ``fleetpipe.static`` each give it a stage to
run; ``ready.py`` walks a plan by what has arrived; ``trace.py`` records what ran. It imports
schedules and transports; both graph modes import it.
"""

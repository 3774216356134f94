"""Runs programs of other frameworks on fleetpipe's pipeline, under the frameworks' own names.

Each framework has a package that translates its names: ``colossalai`` for programs of ColossalAI's
legacy pipelines, ``mindspore`` for those of MindSpore 1.5 and 1.6. ``docs/coming-from.md`` has the
tables of names.
"""

"""Doors for programs of other frameworks: their names, on fleetpipe's pipeline.

A package for each, which translates names and adds no machinery of its own: ``colossalai`` for
programs of ColossalAI's legacy pipelines, ``mindspore`` for those of MindSpore 1.5 and 1.6.
``docs/coming-from.md`` has the tables of names.
"""

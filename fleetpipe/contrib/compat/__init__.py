"""Runs programs of other frameworks, by their names, on fleetpipe's pipeline.

Each framework has a package that translates its names and adds no machinery: ``colossalai`` for
programs of ColossalAI's legacy pipelines, ``mindspore`` for those of MindSpore 1.5 and 1.6.
``docs/coming-from.md`` has the tables of names.
"""

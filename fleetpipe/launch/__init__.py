"""Runs a user's training script: as ``python SCRIPT`` does, or on several ranks at once.

Entered by: ``keeping.copies``, ``log_filter``, ``resume``, ``script``, ``substitution``,
``supervisor.attempts``, ``supervisor.local_ranks``, ``supervisor.options``, ``supervisor.signals``,
``supervisor.state_folder``, ``supervisor.supervisor``.
"""

from __future__ import annotations

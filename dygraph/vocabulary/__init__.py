"""A head over a large vocabulary, of which each rank of a pipeline has a part.

Start with ``head.py``: the description in a list of layers, and the parts. ``borders.py`` is what a
pipeline with a head loads, ``files.py`` what Fleet's folder of layers has of it.
"""

from __future__ import annotations

from fleetpipe.dygraph.vocabulary.head import VocabularyEmbedding, VocabularyHead
from fleetpipe.dygraph.vocabulary.losses import VocabularyLoss, vocabulary_cross_entropy

__all__ = ["VocabularyEmbedding", "VocabularyHead", "VocabularyLoss", "vocabulary_cross_entropy"]

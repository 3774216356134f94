"""A head over a large vocabulary, of which each rank of a pipeline has a part.

Start with ``head.py``: the entry in a list of layers, and the parts. Pipelines with a head load
``borders.py``; ``files.py`` saves the head in Fleet's folder of layers, and
``captured.py`` puts one in the place of a captured model's last Linear.
"""

from __future__ import annotations

from fleetpipe.contrib.vocabulary.head import VocabularyEmbedding, VocabularyHead
from fleetpipe.contrib.vocabulary.losses import VocabularyLoss, vocabulary_cross_entropy

__all__ = ["VocabularyEmbedding", "VocabularyHead", "VocabularyLoss", "vocabulary_cross_entropy"]

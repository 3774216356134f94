"""Which nodes of a cluster take part in an attempt."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

from fleetpipe.contrib.ray.nodes import ClusterSize, RayNode, placed, too_few

THREE = [RayNode("a", "10.0.0.1", 2), RayNode("b", "10.0.0.2", 4), RayNode("c", "10.0.0.3", 1)]


def test_each_node_that_has_room_gets_as_many_ranks_in_a_row() -> None:
    assert placed(THREE, ClusterSize((1, 2), 2), []) == ["a", "a", "b", "b"]
    assert placed(THREE, ClusterSize((3, 3), 1), []) == ["a", "b", "c"]
    assert placed(THREE, ClusterSize((3, 3), 2), []) == []


def test_nodes_of_the_attempt_before_keep_their_ranks() -> None:
    assert placed(THREE, ClusterSize((1, 2), 1), ["c", "a"]) == ["c", "a"]
    # A node that was lost is replaced by another, behind those that stay.
    assert placed(THREE[1:], ClusterSize((2, 2), 1), ["a", "c"]) == ["c", "b"]


def test_ranks_are_a_multiple_of_those_of_a_replica() -> None:
    assert placed(THREE[:2], ClusterSize((1, 2), 2, replica=3), []) == ["a", "a", "b"]
    assert placed(THREE[:1], ClusterSize((1, 2), 2, replica=4), []) == []
    # One process can play all stages of a pipeline.
    assert placed(THREE[:1], ClusterSize((1, 2), 2, replica=4, alone=True), []) == ["a"]


def test_a_cluster_that_is_too_small_is_told_with_what_it_has() -> None:
    told = str(too_few(THREE[:2], ClusterSize((3, 3), 2), "CPU"))
    assert "3 nodes with 2 CPU each" in told
    assert "10.0.0.1 with 2, 10.0.0.2 with 4" in told
    assert "--wait" in told

"""Batches of requests: which are solved together, and how they are filled up."""

from __future__ import annotations

import torch

from lewm.plan.inputs import grouped, largest_batch, padded, round_size

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_only_equal_kinds_share_a_batch():
    assert grouped("abacaba", 10) == [[0, 2, 4, 6], [1, 5], [3]]
    assert grouped("abacaba", 3) == [[0, 2, 4], [6], [1, 5], [3]]
    assert grouped("", 3) == []


def test_a_cpu_decides_one_by_one():
    assert (largest_batch(CPU, 50), largest_batch(CUDA, 50)) == (1, 50)
    assert padded([1, 2, 3], CPU, 50) == [1, 2, 3]


def test_batches_are_padded_with_their_last_one():
    assert padded(list(range(9)), CUDA, 50) == [*range(9), 8]
    assert padded(list(range(8)), CUDA, 50) == [*range(8)]


def test_batches_are_padded_little_to_few_sizes():
    sizes = {count: round_size(count, most=50) for count in range(1, 51)}
    assert len(set(sizes.values())) <= 19
    assert all(count <= size <= 1.25 * count for count, size in sizes.items())
    assert sizes[1] == 1
    assert sizes[10] == 10
    assert sizes[50] == 50, "no more than asked for at most"
    assert round_size(60, most=50) == 60

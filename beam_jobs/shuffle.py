"""Which split, shard and place a record gets: pure arithmetic, no table, no state.

A record's place is `permute(global_index)`, a seeded bijection on [0, N). Places are cut into
splits, splits into shards, so that shards are balanced to within one record by construction
and the same seed gives the same dataset however the work was divided.

The bijection is a Feistel network on the smallest even number of bits that holds N, walked
along its cycle until it lands below N (on average less than four steps).

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
# Odd constants of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]


def permute(indices: Int64Array, *, num_records: int, seed: int) -> Int64Array:
    """Gives each record its place.

    Args:
        indices: int64[n], global indices in [0, num_records).
        num_records: N.
        seed: of the permutation.

    Returns:
        int64[n], places in [0, num_records); over all indices a permutation.

    Raises:
        ValueError: an index lies outside.
    """
    return _walk(indices, num_records, seed, inverse=False)


def unpermute(places: Int64Array, *, num_records: int, seed: int) -> Int64Array:
    """The inverse of `permute`.

    Args:
        places: int64[n] in [0, num_records).
        num_records: N.
        seed: of the permutation.

    Returns:
        int64[n], the global index of the record at each place.

    Raises:
        ValueError: a place lies outside.
    """
    return _walk(places, num_records, seed, inverse=True)


def bounds(num_items: int, num_parts: int) -> Int64Array:
    """Cuts items into parts of sizes that differ by at most one.

    Args:
        num_items: to cut.
        num_parts: at least 1.

    Returns:
        int64[num_parts + 1], where each part starts, and the end.

    Raises:
        ValueError: no parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}.")
    return np.array([i * num_items // num_parts for i in range(num_parts + 1)], np.int64)


def split_sizes(num_records: int, fractions: Sequence[float]) -> list[int]:
    """Cuts records into splits by fractions, exact to within one record.

    Args:
        num_records: N.
        fractions: of the splits, adding up to 1.

    Returns:
        Records of each split, adding up to N.

    Raises:
        ValueError: the fractions don't add up to 1.
    """
    if abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(f"fractions must add up to 1, got {sum(fractions)}.")
    edges, total = [0], 0.0
    for fraction in fractions:
        total += fraction
        edges.append(min(num_records, round(num_records * total)))
    edges[-1] = num_records
    return [stop - start for start, stop in itertools.pairwise(edges)]


def _walk(values: Int64Array, num_records: int, seed: int, *, inverse: bool) -> Int64Array:
    values = np.asarray(values, np.int64)
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < num_records):
        raise ValueError(f"indices must lie in [0, {num_records}), got {values.min()} to {values.max()}.")
    half_bits = max(1, ((num_records - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed)
    if inverse:
        keys = keys[::-1]
    result = _feistel(values.astype(np.uint64), half_bits, keys, inverse)
    while True:
        outside = np.flatnonzero(result >= np.uint64(num_records))
        if not len(outside):
            return result.astype(np.int64)
        result[outside] = _feistel(result[outside], half_bits, keys, inverse)


def _round_keys(seed: int) -> list[int]:
    state, keys = seed & _MASK_64, []
    for _ in range(_ROUNDS):
        state = (state + _GAMMA) & _MASK_64
        z = ((state ^ (state >> 30)) * _MIX_1) & _MASK_64
        z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
        keys.append(z ^ (z >> 31))
    return keys


def _feistel(values: UInt64Array, half_bits: int, keys: Sequence[int], inverse: bool) -> UInt64Array:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    if inverse:
        left, right = right, left
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    if inverse:
        left, right = right, left
    return (left << bits) | right


def _mix(values: UInt64Array, key: int) -> UInt64Array:
    z: UInt64Array = values + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))

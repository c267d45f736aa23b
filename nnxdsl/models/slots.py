"""Sizes of a sampler's batch, which a plan knows before anything is sampled: slots, prefixes, prompts."""

from __future__ import annotations

ROUND_TO = 16
"""Prompts are padded to a multiple of this, so that prompts of similar length share a compiled program."""

SLOTS, MOST_SLOTS = {"cpu": 64}, 256
"""Most completions at one time, by platform and on others. More make a pass take longer and each of its tokens less."""

PROMPTS = {"cpu": 16}
"""Most prompts that are computed at one time, by platform; on others as many as slots."""


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number: of sizes, so that few are compiled."""
    return 1 << max(number - 1, 0).bit_length()


def padded(tokens: int) -> int:
    """Tokens of a prompt with its padding."""
    return -(-tokens // ROUND_TO) * ROUND_TO


def padded_turn(tokens: int) -> int:
    """Tokens before a later turn of an episode, with their padding: a power of two, since each turn has its own."""
    return padded(power_of_two(tokens))


def most_slots(platform: str) -> int:
    """Most completions that are decoded at one time."""
    return SLOTS.get(platform, MOST_SLOTS)


def most_prompts(platform: str, slots: int) -> int:
    """Most prompts that are computed at one time."""
    return min(slots, PROMPTS.get(platform, slots))


def group_size(rows: int, prompts: int, slots: int) -> int:
    """Rows that share a prefix: the power of two that is not above the mean number of a prompt's rows."""
    mean = min(rows // max(prompts, 1), slots)
    return 1 << max(mean.bit_length() - 1, 0)


def most_prefixes(slots: int, places: int, groups: int | None) -> int:
    """Prefixes of `places` rows that are stored at one time, of `groups` in all; None for any number of groups."""
    count = -(-slots // places)
    # A prefix stays until its last row ends, when most of the others have.
    most = count if places == 1 else 2 * count
    return most if groups is None else min(groups, most)

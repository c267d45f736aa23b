"""Each mistake of mutations.py replaces text that stands once in its file, before a test that exists."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=range(len(MUTATIONS)))
def test_a_mutation_has_one_place_and_a_test(mutation: Mutation) -> None:
    assert (ROOT / "nnxdsl" / mutation.file).read_text(encoding="utf-8").count(mutation.right) == 1
    assert mutation.right != mutation.wrong
    assert (ROOT / "tests" / mutation.tests).is_file()

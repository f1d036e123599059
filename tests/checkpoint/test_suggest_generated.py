"""`suggest` on naming schemes nobody wrote: drawn from a seed, of models whose right mapping is thereby known.

What cannot be told (names replaced by nonsense, say) may be left open. A wrong mapping is never allowed. For more
seeds: ``python tests/support/suggest_schemes.py``.
"""

from __future__ import annotations

import dataclasses

import pytest

from flashdreams.core.checkpoint.suggest import suggest
from suggest_schemes import generate, places, wrong

pytestmark = pytest.mark.ci_cpu

TELLING = {"synonyms", "mixed_synonyms", "camel_case", "unchanged", "wrap", "renumber", "cut_list", "as_convolutions"}


@pytest.mark.parametrize("first", range(0, 48, 12))
def test_no_scheme_is_mapped_wrongly(first: int):
    for seed in range(first, first + 12):
        case = generate(seed)
        found = suggest(case.model, case.checkpoint)
        assert places(found, case.checkpoint).keys() == found.mapping.keys()
        assert wrong(case, found) == {}, f"seed {seed}: {', '.join(case.how)}"
        remaining = {key for rest in found.remaining for key in rest.keys}
        assert remaining >= case.model.keys() - found.mapping.keys(), "every key that is left open is listed"


def test_published_models_under_names_that_mean_something_are_nearly_all_understood():
    counts = [0, 0]
    for seed in range(100, 300):
        case = generate(seed)
        if case.how[0] != "invented" and TELLING.issuperset(case.how[1:]):
            counts[0] += len(suggest(case.model, case.checkpoint).mapping)
            counts[1] += len(case.right)
    assert counts[0] >= 0.9 * counts[1] > 0


def test_a_mapping_that_is_wrong_is_noticed():
    case = next(case for case in map(generate, range(100)) if not case.how[1:] and case.right)
    found = suggest(case.model, case.checkpoint)
    assert found.mapping and wrong(case, found) == {}
    first, second = sorted(found.mapping)[:2]
    swapped = {**case.right, first: case.right[second], second: case.right[first]}
    assert wrong(dataclasses.replace(case, right=swapped), found).keys() == {first, second}

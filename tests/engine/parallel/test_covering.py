"""The generator of few cases leaves no pair out."""

from itertools import combinations, product

from tests.engine.parallel.covering import covering

ROWS = [
    dict(zip("abcd", values, strict=True))
    for values in product(range(4), range(3), range(3), range(2))
    if values[0] != values[1]
]


def pairs(rows, columns):
    return {(one, two, row[one], row[two]) for row in rows for one, two in combinations(columns, 2)}


def test_all_pairs_that_there_are_in_about_as_few_rows_as_can_be():
    chosen = [ROWS[place] for place in covering(ROWS)]
    assert pairs(chosen, "abcd") == pairs(ROWS, "abcd")
    assert len(chosen) <= 15  # a and c alone have 12


def test_columns_apart_need_only_occur():
    chosen = [ROWS[place] for place in covering(ROWS, [frozenset("ac"), frozenset("ab")])]
    assert {row["a"] for row in chosen} == {0, 1, 2, 3}
    assert pairs(chosen, "bcd") == pairs(ROWS, "bcd")
    assert len(chosen) <= 11 < len(covering(ROWS))

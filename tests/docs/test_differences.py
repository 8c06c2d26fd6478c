"""What docs/differences.md says of messages and cases is in the code."""

from pathlib import Path

import pytest
import random_outcomes
from random_outcomes import PAGE, literals, on_the_page, told

REFUSED = [row.beginning for row in told() if row.table == "Refused here"]
CASES = [row.beginning for row in told() if row.table == "Other texts"]


@pytest.mark.parametrize("beginning", REFUSED)
def test_a_message_is_one_of_the_codes(beginning):
    parts = [part for part in beginning.split("...") if any(character.isalpha() for character in part)]
    assert parts
    for part in parts:
        assert part in literals(), f"{part!r} is in no text of the code"


def test_the_cases_are_those_that_random_calls_know():
    source = Path(random_outcomes.__file__).read_text()
    assert len(CASES) > 5
    for case in CASES:
        assert f'"{case}' in source or f'"equal: {case}' in source, case


def test_every_row_has_a_message():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    heads = [line for line in rows if line.startswith(("|---", "| the error", "| case"))]
    assert len(told()) == len(rows) - len(heads)


def test_a_message_is_matched_from_its_beginning_by_the_longest():
    message = "top_k=3 cannot apply: greedy has no use for it: it is for assistant_model"
    assert on_the_page("Refused here", message).endswith("it is for assistant_model")
    assert on_the_page("Refused here", "and " + message.replace("=", "")) is None
    assert on_the_page("Refused there", message) is None

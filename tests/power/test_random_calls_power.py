"""The first 300 random calls notice each of these breakages (tests/support/damage.py)."""

import pytest
from damage import DAMAGES
from random_calls import cells, draw, play

NOTICED = [
    "shift_mask",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "accept_every_proposal",
            "look_for_stop_strings_in_new_text_alone",
            "shift_growing_write",
            "shift_write_index",
            "shift_decode_positions",
            "shift_mask_sizes",
            "keep_one_column_less",
            "forget_states",
            "read_pads_into_states",
            "read_the_encoder_of_another_row",
            "leave_rows_where_they_are",
            "fork_rows_in_turn",
            "keep_the_worst_beams",
            "read_pads_of_one_row_as_tokens",
            "count_end_ids_once",
            "draw_once_more",
            "forget_processors_of_the_call",
            "forget_parameters_that_apply",
            "record_no_attentions",
            "record_states_of_the_last_token_alone",
        )
    ),
]


@pytest.mark.parametrize("damage", NOTICED)
def test_a_breakage_is_noticed(damage, monkeypatch):
    cells()  # which caches lose nothing is found out before
    DAMAGES[damage](monkeypatch)
    for begin in range(0, 300, 10):
        if play(range(begin, begin + 10))[2]:
            return
    pytest.fail("300 calls were all right")


def test_without_damage_they_pass():
    assert not play(range(10))[2]
    assert draw(3).script() == draw(3).script()

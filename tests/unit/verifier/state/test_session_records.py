"""What a session counts of its drafter."""

from __future__ import annotations

from outrider_verifier.state.session_records import DrafterRecord


def test_rounds_without_a_draft_count_while_they_follow_each_other() -> None:
    record = DrafterRecord()
    assert [record.record_undrafted_round(number) for number in (0, 1, 2, 4, 5)] == [1, 2, 3, 1, 2]
    record.reset_undrafted_rounds()
    assert record.record_undrafted_round(6) == 1


def test_losses_count_until_there_is_another_drafter() -> None:
    record = DrafterRecord()
    assert [record.record_loss(), record.record_loss()] == [1, 2]
    record.reset_losses()
    assert record.record_loss() == 1

"""Nothing that a container lists can be written outside the destination."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import TransferError
from orchestrator.transfer import Wanted, check_path, link_stays_inside, place


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "..", "", "a\0b", "a/.."])
def test_a_path_that_leaves_the_root_is_refused(path: str) -> None:
    with pytest.raises(TransferError):
        check_path(path)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    destination = tmp_path / "destination"
    destination.mkdir()
    (destination / "a").symlink_to(outside)
    with pytest.raises(TransferError, match="is a link"):
        place(destination, "a/b/file")
    assert not list(outside.iterdir())


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "c d", "-x"]), min_size=1).map("/".join))
def test_whatever_is_accepted_lies_below(path: str) -> None:
    try:
        parts = check_path(path)
    except TransferError:
        assert ".." in path or not PurePosixPath(path).parts
    else:
        assert ".." not in parts


@pytest.mark.parametrize(
    "path,target,stays",
    [
        ("link", "file", True),
        ("a/link", "../file", True),
        ("a/link", "../../file", False),
        ("link", "/etc/passwd", False),
        ("link", "a/../../x", False),
        ("a/b/link", "./c/../d", True),
    ],
)
def test_links_that_point_outside_are_known(path: str, target: str, stays: bool) -> None:
    assert link_stays_inside(path, target) is stays


def test_what_the_trainer_keeps_for_itself_stays_in_the_container() -> None:
    from trainer.data.features import DATA, DESCRIPTION

    kept = {f"data/{DATA}", f"data/{DESCRIPTION}"}
    others = {"train.log", "data/report.json", "checkpoints/step-00000500/state.json"}
    wanted = Wanted(checkpoints=["step-00000500"])
    assert {path for path in kept | others if wanted(path)} == others
    assert all(map(Wanted(every=True), kept | others))

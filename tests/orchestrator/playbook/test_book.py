"""What a playbook may say, how values get into it, and that they get there as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import NotFoundError, UsageError
from orchestrator.playbook.actions import Exec, Launch, Wait
from orchestrator.playbook.book import CHECKOUT, Playbook, available, find, load, parse

SHIPPED = ["bring-up", "diagnose-and-collect", "launch", "multi-node", "resume"]


def book(steps: str, variables: str = "{}") -> Playbook:
    return parse(f"variables: {variables}\nsteps:\n{steps}", "book")


def refused(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(text, "book").bind()
    return str(caught.value)


def test_steps_take_the_name_of_their_action_or_their_own() -> None:
    steps = book("  - preflight\n  - exec: {command: [a]}\n  - exec: {command: [b]}\n").steps
    assert [s.name for s in steps] == ["preflight", "exec", "exec-2"]
    named = book("  - launch:\n    name: first\n  - wait: {until: training}\n").steps
    assert [s.name for s in named] == ["first", "wait"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step: []", "unknown key 'step'; did you mean 'steps'?"),
        ("steps: [{lanch: {}}]", "step 1: unknown action 'lanch'; did you mean 'launch'?"),
        ("steps: [{launch: {nmae: x}}]", "launch has no parameter 'nmae'; did you mean 'name'?"),
        ("steps: [{preflight: {deep: 1}}]", "no parameter 'deep'; known: trainer"),
        ("steps: [{push: {}, launch: {}}]", "step 1 has 2 actions; a step has one"),
        ("steps: []", "steps is not a list of steps"),
        ("steps: [{exec: {command: bash}}]", "step exec: command: Input should be a valid list"),
        ("steps: [{exec: {command: []}}]", "step exec: command: List should have at least 1"),
        ("steps: [{wait: {until: never}}]", "step wait: until: Input should be 'training' or"),
        ("steps: [{launch: {name: '{{nane}}'}}]", "step launch: unknown variable 'nane'"),
        ("steps: [push, {name: push, launch: {}}]", "two steps are named 'push'"),
        ("steps: [{launch: {name: {{name}}}}]", 'put quotes round it: "{{name}}"'),
        ("steps: [", "book:"),
        ("steps: [push]\nsteps: [launch]", "book:2: 'steps' is given twice"),
        ("variables: {a: 2026-13-45}\nsteps: [push]", "month must be in 1..12"),
        ("[]", "book is no playbook"),
        ("variables: {a-b: 1}\nsteps: [push]", "'a-b' is no name for a variable"),
        ("variables: {a: {b: 1}}\nsteps: [push]", "the default of a is neither text, number"),
    ],
)
def test_a_mistake_is_told_in_one_message_with_the_nearest_right_word(text: str, said: str) -> None:
    assert said in refused(text)


def test_a_variable_alone_keeps_its_type_and_inside_a_text_is_written_out() -> None:
    steps = book(
        '  - exec: {command: "{{words}}", timeout_s: "{{limit}}", cwd: "/runs/{{limit}}"}\n',
        "{words: [a, b c], limit: 30}",
    )
    (bound,) = steps.bind()
    assert bound.action == Exec(command=["a", "b c"], timeout_s=30, cwd="/runs/30")


def test_an_empty_text_means_that_an_optional_parameter_is_not_given() -> None:
    (bound,) = book('  - launch: {config: "{{config}}"}\n', '{config: ""}').bind()
    assert isinstance(bound.action, Launch)
    assert bound.action.config is None


def test_set_is_text_unless_the_default_has_another_type() -> None:
    steps = book(
        '  - exec: {command: "{{words}}", timeout_s: "{{limit}}"}\n  - wait: {run: "{{run}}"}\n',
        '{words: [a], limit: 3.5, run: ""}',
    )
    bound = steps.bind(['words=["x", "y=z"]', "limit=1.5e1", "run=[1]"])
    assert bound[0].action == Exec(command=["x", "y=z"], timeout_s=15)
    assert bound[1].action == Wait(run="[1]")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("limit=soon", "the variable is a whole number"),
        ("words=a b", "the variable is a list of texts"),
        ("limt=3", "no variable 'limt'; did you mean 'limit'?"),
        ("limit", "--set 'limit' has no value"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(setting: str, said: str) -> None:
    steps = book(
        '  - exec: {command: "{{words}}", timeout_s: "{{limit}}"}\n', "{words: [a], limit: 3}"
    )
    with pytest.raises(UsageError) as caught:
        steps.bind([setting])
    assert said in str(caught.value)


def test_a_variable_without_a_default_must_be_given() -> None:
    steps = book('  - wait: {run: "{{run}}"}\n', "{run: null}")
    with pytest.raises(UsageError, match="needs a value for run"):
        steps.bind()
    assert steps.bind(["run=r1"])[0].action == Wait(run="r1")


HOSTILE = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "{{other}}",
            "{{ value }}",
            "$(rm -rf /)",
            "`id`",
            "a; b",
            "a'b\"c",
            "\n- launch: {}",
            "--force",
            "\\1",
            "\\g<0>",
            "{0.__class__}",
            "%s",
            "",
        ]
    ),
)


@given(HOSTILE)
def test_whatever_a_value_holds_it_stays_one_word_and_is_never_read_again(value: str) -> None:
    steps = book(
        '  - exec:\n      command: [echo, "{{value}}", "<{{value}}|{{other}}>"]\n'
        '      env: {V: "{{value}}"}\n',
        '{value: "", other: secret}',
    )
    (bound,) = steps.bind([f"value={value}"])
    assert isinstance(bound.action, Exec)
    assert bound.action.command == ["echo", value, f"<{value}|secret>"]
    assert bound.action.env == {"V": value}


@given(st.lists(HOSTILE, min_size=1))
def test_a_list_of_words_arrives_word_by_word(words: list[str]) -> None:
    (bound,) = book('  - exec: {command: "{{words}}"}\n', "{words: [a]}").bind(
        [f"words={json.dumps(words)}"]
    )
    assert isinstance(bound.action, Exec)
    assert bound.action.command == words


def test_the_shipped_playbooks_are_found_by_name_and_fit_the_schema(tmp_path: Path) -> None:
    assert [name for name in available(tmp_path) if name in SHIPPED] == SHIPPED
    for name in SHIPPED:
        playbook = load(find(name, tmp_path))
        given_values = [f"{n}=x" for n, value in playbook.variables.items() if value is None]
        assert playbook.bind(given_values), name
        assert playbook.description, name


def test_the_users_own_playbook_comes_before_the_shipped_one(tmp_path: Path) -> None:
    own = tmp_path / "launch.yaml"
    own.write_text("steps: [push]")
    assert find("launch", tmp_path) == own
    assert find("bring-up", tmp_path) == CHECKOUT / "bring-up.yaml"


def test_a_name_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="did you mean 'bring-up'"):
        find("bringup", tmp_path)
    with pytest.raises(NotFoundError, match=r"no playbook file \./x\.yaml"):
        find("./x.yaml", tmp_path)

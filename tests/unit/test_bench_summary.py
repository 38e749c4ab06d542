"""What is reported of a method: identity, acceptance, switches, likelihood, groups."""

import math
from pathlib import Path

import pytest

from bench_cases import make_run, make_step
from entmtp.bench.document import Outcome, find_differences
from entmtp.bench.runs import Run, size_class
from entmtp.bench.specbench import group_measures, read_questions, write_answers
from entmtp.bench.summary import summarize, switch_cost
from entmtp.bench.tasks import Task, read_tasks
from entmtp.commands.bench_table import BenchProgress
from entmtp.errors import InputError
from entmtp.workload import PromptRecord
from fakes import FakeClock


def make_task(size: int = 2) -> Task:
    """A task whose prompts are not looked at."""
    records = tuple(PromptRecord(f"question/{i}", "qa", ("why?",)) for i in range(size))
    return Task("qa", records, ())


def test_a_switch_costs_what_steps_of_the_same_plan_take_longer() -> None:
    """Plans of different cost are not compared with each other."""
    plans = [("a", 1.0), ("a", 1.0), ("b", 9.5), ("b", 9.0), ("a", 1.25), ("a", 1.0)]
    steps = [make_step(plan, ms) for plan, ms in plans]
    assert switch_cost([steps]) == pytest.approx((0.5 + 0.25) / 2)
    assert switch_cost([steps[:2], steps[3:4]]) is None  # the next text is no switch


def test_switches_between_grown_trees_compare_trees_of_one_shape() -> None:
    """Within a class of sizes larger trees cost more, which is no cost of a switch."""
    sizes = [(5, 2), (8, 2), (8, 2), (3, 2), (8, 2), (5, 2), (8, 3), (3, 2), (8, 3)]
    steps = [
        make_step(size_class(nodes), 10 * nodes + depth, nodes=nodes, depth=depth)
        for nodes, depth in sizes
    ]
    assert switch_cost([steps]) == 0.0
    steps[4] = make_step("5-8 nodes", 82.5, nodes=8, depth=2)  # after a change; the other is not
    assert switch_cost([steps]) == pytest.approx((0.5 + 0.0) / 2)


def test_classes_of_sizes() -> None:
    """Twice as wide each time."""
    names = {n: size_class(n) for n in range(70)}
    assert list(dict.fromkeys(names.values())) == [
        "none",
        *(f"{span} nodes" for span in ("1-2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128")),
    ]
    for nodes in range(1, 70):
        least, most = map(int, names[nodes].split()[0].split("-"))
        assert least <= nodes <= most


def test_results_of_a_method() -> None:
    """Counts come from the steps; identity is a boolean beside its count."""
    steps = [make_step("t", 2.0, nodes=4, accepted=2), make_step("none", 1.0, nodes=0, accepted=0)]
    runs = [make_run(0, 1.0), make_run(1, 1.0)]
    runs += [make_run(0, 0.5, method="hydra", steps=steps, nll=1.5)]
    runs += [make_run(1, 0.5, method="hydra", steps=steps, tokens=(5, 6, 7, 8, 1), nll=1.5)]
    results, ratios = summarize(make_task(), runs, {"hydra": 1000})
    found = results["hydra"]
    assert (found["identical"], found["num_identical"], found["num_runs"]) == (False, 1, 2)
    assert found["mean_acceptance_length"] == 2.0
    assert found["acceptance_rate"] == 0.5
    assert found["nodes_per_step"] == 2.0
    assert found["plan_shares"] == {"t": 0.5, "none": 0.5}
    assert (found["num_switches"], found["num_resizes"]) == (2, 2)
    assert found["split_ms"] == {"schedule": 0.0, "draft": 0.0, "forward": 1.5, "rest": 0.0}
    assert found["perplexity"] == pytest.approx(math.exp(1.5 / 5))
    assert found["gap_nats"] == pytest.approx(0.5 / 5)
    assert found["loaded_bytes"] == 1000
    assert [one["identical"] for one in found["prompts"]] == [True, False]
    assert results["plain"]["identical"]
    assert results["plain"]["gap_nats"] == 0.0
    assert ratios["hydra/plain"]["median"] == 2.0


def test_programs_that_do_not_tell_their_steps() -> None:
    """Tokens a step are those decoded, over forwards; the rest is unknown."""
    runs = [make_run(0, 1.0), make_run(0, 1.0, method="hf")]
    results, _ = summarize(make_task(1), runs, {})
    assert results["hf"]["mean_acceptance_length"] == 1.0
    assert results["hf"]["is_peer"]
    assert results["hf"]["ci95"] is None
    for name in ("split_ms", "plan_shares", "num_switches", "switch_cost_ms", "acceptance_rate"):
        assert results["hf"][name] is None


def test_runs_come_back_from_json() -> None:
    """The work file loses nothing."""
    run = make_run(3, 0.25, method="dynamic", repeat=2, steps=[make_step("dynamic", 1.5)])
    assert Run.from_dict(run.as_dict()) == run


def test_spec_bench_compares_means_over_questions() -> None:
    """Speed of a question is its tokens over its whole time; steps count once each."""
    steps = [make_step("t", 1.0, accepted=3), make_step("t", 1.0, accepted=0)]
    plain = [make_run(0, 2.0), make_run(1, 4.5)]
    own = [make_run(i, 0.75, method="hydra", steps=steps) for i in range(2)]
    measures = group_measures([make_task()], [[*plain, *own]])
    assert list(measures["hydra"]) == ["qa", "overall"]
    found = measures["hydra"]["qa"]
    assert found["speed_up"] == pytest.approx((5 / 1.25) / ((5 / 2.5 + 5 / 5.0) / 2))
    assert found["mean_accepted_tokens"] == 2.5
    assert measures["plain"]["overall"]["speed_up"] == 1.0


def test_answers_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(InputError, match="cannot be written"):
        write_answers(tmp_path / "nowhere", "m", [make_task(1)], [[make_run(0, 1.0)]])


def test_questions_are_grouped(tmp_path: Path) -> None:
    """The eight kinds of MT-bench are one group; the limit holds for each group."""
    file = tmp_path / "question.jsonl"
    categories = ("qa", "writing", "stem", "coding", "qa")
    lines = [
        f'{{"question_id": {i}, "category": "{c}", "turns": ["t{i}"]}}'
        for i, c in enumerate(categories)
    ]
    file.write_text("\n".join(lines))
    groups = read_questions(file, limit=2)
    assert {name: [r.id for r in found] for name, found in groups.items()} == {
        "mt_bench": ["question/1", "question/2"],
        "qa": ["question/0", "question/4"],
    }
    with pytest.raises(InputError, match="limit is 0"):
        read_questions(file, limit=0)
    file.write_text(lines[0].replace('"qa"', '"poetry"'))
    with pytest.raises(InputError, match="category 'poetry'"):
        read_questions(file)


def test_tasks_are_named_after_files(tmp_path: Path) -> None:
    """Two of one name are refused."""
    (tmp_path / "other").mkdir()
    files = [tmp_path / "mine.jsonl", tmp_path / "other" / "mine.json"]
    for file in files:
        file.write_text('{"prompt": "hello"}')
    assert list(read_tasks([str(files[0]), "code"], 3)) == ["mine", "code"]
    with pytest.raises(InputError, match="reported as 'mine'"):
        read_tasks(map(str, files))
    with pytest.raises(InputError, match="reported as 'code'"):
        read_tasks(["code", "code"])


def test_only_texts_that_must_be_plain_ones_are_a_failure() -> None:
    """Other programs may differ, and so may all under typical acceptance."""
    outcome, other = Outcome(), (5, 6, 7, 8, 1)
    runs = [make_run(0, 1.0), make_run(0, 1.0, method="hydra", tokens=other)]
    runs += [make_run(0, 1.0, method="hf", tokens=other), make_run(0, 1.0, method="lookup")]
    outcome.add(make_task(1), runs, {"hydra": {"share": None}}, {})
    assert find_differences(outcome, is_exact=True) == ["qa: hydra (0 of 1 texts)"]
    assert find_differences(outcome, is_exact=False) == []
    assert outcome.headroom == {"qa": {"hydra": None}}


def test_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of a stage always; where nobody looks not more often than twice a minute."""
    clock = FakeClock()
    progress = BenchProgress(is_terminal=False, clock=clock)
    for done in range(1, 5):
        progress("code", done, 4)
        clock.now += 20.0
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["code: 3/4 prompts, 0:40, 0:20 left", "code: 4/4 prompts, 1:00"]
    progress = BenchProgress(is_terminal=True, clock=clock)
    progress("chat", 1, 2)
    assert capsys.readouterr().err == "\r\x1b[2Kchat: 1/2 prompts, 0:00"

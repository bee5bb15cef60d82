"""`make compat`: what is installed where, and what the page says of a run."""

import json

import pytest

from tests.compat import environments, lanes, page
from tests.compat.environments import Pair


@pytest.mark.parametrize(
    ("pair", "requirements"),
    [
        (Pair("2.15.0", "3.15.1"), ("torch==2.15.0", "keras==3.15.1")),
        (Pair("newest", "newest"), ("torch", "keras")),
        (Pair("newest", "nightly"), ("torch", "keras-nightly")),
    ],
    ids=lambda each: each.name if isinstance(each, Pair) else "",
)
def test_a_pair_names_its_packages(pair, requirements):
    assert pair.requirements() == requirements
    assert pair.moves == ("==" not in "".join(requirements))


def test_environments_are_below_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "shardcore" / "compat" in environments.cache().parents


def test_an_environment_is_made_once_and_again_when_the_tests_need_another_package(
    monkeypatch, tmp_path
):
    commands = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        environments.subprocess, "run", lambda command, **_: commands.append(command)
    )
    pair = Pair("2.15.0", "3.15.1")
    folder = environments.cache() / pair.name
    folder.mkdir(parents=True)
    made = []
    for tools in (environments.TOOLS, environments.TOOLS, ("attrs", "another")):
        monkeypatch.setattr(environments, "TOOLS", tools)
        assert environments.python_of(pair) == folder / "bin" / "python"
        made.append([command for command in commands if "install" in command])
        commands.clear()
    assert [len(each) for each in made] == [1, 0, 1]
    assert made[-1][0][-4:] == ["torch==2.15.0", "keras==3.15.1", "attrs", "another"]


def test_every_lane_has_tests():
    assert len(lanes.COUNTS) > 3
    for files in lanes.LANES.values():
        assert all((lanes.ROOT / each).exists() for each in files if not each.startswith("-"))


def run(torch, keras, **changes):
    lane = {"failed": [], "skipped": 0, "passed": 9, "day": "2026-11-24", "commit": "abc"}
    found = {
        "versions": {"torch": torch, "keras": keras, "python": "3.11.7"},
        "broken": [],
        "strategy": "dtensor",
        "passed_over": {},
        "day": "2026-11-24",
        "commit": "abc",
        "lanes": {"unit": lane, "counts": lane | {"failed": ["a::b"], "skipped": 2}},
    }
    return found | changes


def test_the_page_has_a_line_for_each_run_the_newest_first():
    manual = {"strategy": "manual", "passed_over": {"dtensor": "gone."}, "lanes": {}}
    runs = [
        run("2.9.0", "3.15.1", lanes={}, error="no", broken=["x"]),
        run("2.15.0", "3.15.1"),
        run("2.15.0", "3.14.1", **manual),
    ]
    text = list(page.lines(runs))
    counted = "9 passed, 1 failed, 2 skipped | not run | not run"
    day = "2026-11-24, `abc`"
    assert text[2:5] == [
        f"| 2.15.0 | 3.15.1 | 3.11.7 | `dtensor` | 9 passed | not run | {counted} | {day} |",
        f"| 2.15.0 | 3.14.1 | 3.11.7 | `manual`: gone. | {' | '.join(['not run'] * 5)} | {day} |",
        f"| 2.9.0 | 3.15.1 | 3.11.7 | refused | {' | '.join(['not run'] * 5)} | {day} |",
    ]
    assert text[5:] == [
        "\ntorch 2.15.0, Keras 3.15.1, Python 3.11.7:\n",
        "- `a::b` failed",
        "\ntorch 2.9.0, Keras 3.15.1, Python 3.11.7:\n",
        "- x",
    ]


def test_a_line_names_the_commit_of_each_lane_if_they_differ():
    found = run("2.15.0", "3.15.1")
    found["lanes"]["matrix"] = found["lanes"]["unit"] | {"day": "2026-11-26", "commit": "def"}
    when = "unit, counts: 2026-11-24, `abc`; matrix: 2026-11-26, `def`"
    assert list(page.lines([found]))[2].endswith(f"| {when} |")


def test_the_page_keeps_what_other_checkouts_have_run(monkeypatch, tmp_path):
    written = tmp_path / "page.md"
    written.write_text(f"before {page.BEGIN} {page.END} after")
    monkeypatch.setattr(page, "PAGE", written)
    monkeypatch.setattr(lanes, "ON_PAGE", tmp_path / "on_page.json")
    for keras in ("3.14.1", "3.15.1"):
        monkeypatch.setattr(lanes, "RESULTS", tmp_path / keras)
        lanes.RESULTS.mkdir()
        (lanes.RESULTS / f"{keras}.json").write_text(json.dumps(run("2.15.0", keras)))
        page.write()
    one = run("2.15.0", "3.15.1")
    one["lanes"] = {"keras": one["lanes"]["unit"]}
    (lanes.RESULTS / "3.15.1.json").write_text(json.dumps(one))
    page.write()
    text = written.read_text()
    cells = "3.11.7 | `dtensor` | 9 passed | not run | 9 passed, 1 failed, 2 skipped |"
    newest, older = (f"| 2.15.0 | {keras} | {cells} " for keras in ("3.15.1", "3.14.1"))
    assert text.index(f"{newest}9 passed | ") < text.index(f"{older}not run | ")
    assert text.startswith("before ")
    assert text.endswith(" after")


def test_lanes_of_the_same_versions_are_kept(monkeypatch, tmp_path):
    versions = {"python": "3.11.7"}
    found = lambda _: {"versions": dict(versions), "broken": [], "strategy": "dtensor"}  # noqa: E731
    passed = {"failed": [], "skipped": 0, "passed": 9, "seconds": 3}
    commits = iter(("abc", "def", "ghi"))
    for name, stand_in in {
        "RESULTS": tmp_path,
        "ON_PAGE": tmp_path / "page",
        "python_of": lambda _: tmp_path / "bin" / "python",
        "site_packages": lambda python: python,
        "_probe": found,
        "_commit": lambda: next(commits),
        "_run": lambda *_: dict(passed),
    }.items():
        monkeypatch.setattr(lanes, name, stand_in)
    monkeypatch.setattr(lanes.tests_of_keras, "add", lambda folder: None)

    def commits_after(lane):
        assert lanes.run(Pair("2.15.0", "3.15.1"), [lane])
        (kept,) = tmp_path.glob("python-*-torch-2.15.0-keras-3.15.1.json")
        ran = json.loads(kept.read_text())["lanes"]
        return {name: each["commit"] for name, each in ran.items()}

    assert commits_after("unit") == {"unit": "abc"}
    assert commits_after("matrix") == {"unit": "abc", "matrix": "def"}
    versions["python"] = "3.11.8"
    assert commits_after("counts") == {"counts": "ghi"}

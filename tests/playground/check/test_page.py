"""The report's page, as a browser shows it."""

from playground.check.examination import examine
from playground.check.page import Drawing, line, page, time_line
from playground.check.properties import named
from playground.check.serving import attend
from tests.browser import browser
from tests.playground.check.sick import LifoDecodes, WholeOnly


def test_a_page_opens_by_itself_and_says_what_is_wrong_first(tmp_path):
    report = examine(LifoDecodes, 3, properties=named(["errors", "starvation", "preemption"]), patience=0)
    (failed,) = report.failed
    drawing = Drawing("starvation", failed.problem, failed.case, attend(failed.case, LifoDecodes), "replay <it>")
    file = tmp_path / "report.html"
    file.write_text(page("lifo & co", "3 cases", [line(one) for one in report.verdicts], [drawing]), encoding="utf-8")
    with browser() as shown:
        shown.open(file)
        assert shown.errors == []
        assert shown.requested == [file.resolve().as_uri()]
        assert shown.run("document.querySelector('h1').textContent") == "lifo & co"
        assert shown.run("[...document.querySelectorAll('td b')].map(one => one.textContent)")[0] == "starvation"
        assert shown.run("document.querySelector('pre').textContent") == "replay <it>"
        box = "document.querySelector('svg').getBoundingClientRect()"
        assert shown.run(f"{box}.width") >= 600
        steps = len(drawing.outcome.steps)
        assert shown.run("document.querySelectorAll('svg rect title').length") >= min(steps, 160)
        # Nothing is drawn outside of the picture.
        assert shown.run(
            "[...document.querySelectorAll('svg text, svg rect')].every(one => one.getBoundingClientRect().right"
            f" <= {box}.right + 1)"
        )


def test_who_was_never_served_has_a_row_too():
    (verdict,) = examine(WholeOnly, 1, properties=named(["stall"]), patience=0).verdicts
    outcome = attend(verdict.case, WholeOnly)
    drawn = time_line(verdict.case, outcome)
    served = {id for step in outcome.steps for id in step.columns.sequence}
    never = [one for one in verdict.case.requests if one.id not in served]
    assert never and all(f">{one.id} ({one.prompt_length} + ?)<" in drawn for one in never)

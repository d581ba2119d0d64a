import pytest


@pytest.mark.slow
def test_the_tour_on_a_few_requests(playground):
    # What the user sets holds for all of its runs.
    outcome = playground(
        "+experiment=quickstart", "workload.requests=8", "study.probe=8", "study.policies=[orca,vllm_v1]"
    )
    assert outcome.code == 0, outcome.err
    folder = outcome.run_dir
    assert folder.name.endswith("_quickstart")
    for line in ("Capacity under orca", "Where it would not matter", "answers soonest"):
        assert line in outcome.out
    assert outcome.out.count("every decision identical") == 2
    for part in ("sim", "engine"):
        assert {path.name for path in (folder / part).iterdir()} == {"orca", "vllm_v1", "plots"}
        assert len(list((folder / part / "plots").glob("*.png"))) == 3
    assert outcome.last["engine"]["vllm_v1"]["completed"] == 8


def test_its_options_are_checked(playground):
    outcome = playground("+experiment=quickstart", "study.load=0")
    assert outcome.code == 2
    assert outcome.err == "error: study.load=0 must be more than 0 (1 is the measured capacity)\n"

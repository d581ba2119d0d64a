"""Who may know how long answers will be: parts whose type is an oracle, and nobody else."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import pytest
from hypothesis import given, settings

import policies
from experiments.errors import MEND, tell
from playground.core import Request, RequestView, Spec
from playground.oracle import LengthUnknown, Oracle, oracles
from playground.scheduler import Scheduler
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.order import Sjf
from policies.predictors import LogNormal, OracleLength, Saturating
from tests.playground.fakes import Greedy
from tests.playground.laws import serve_under, simulate
from tests.playground.strategies import Scenario, scenarios

# --- what a policy can reach


def reachable(root: object) -> list[object]:
    """Everything that attributes, private ones too, containers and closures lead to.

    Not what the interpreter's own means lead to (`__self__` of a bound method, `gc`): who uses those can read anything.
    """
    found, seen, ahead = [], set(), [root]
    while ahead:
        thing = ahead.pop()
        if id(thing) in seen or isinstance(
            thing, type | ModuleType | MethodType | BuiltinFunctionType | str | bytes | int
        ):
            continue
        seen.add(id(thing))
        found.append(thing)
        if isinstance(thing, Mapping):
            ahead += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            ahead += thing
        elif isinstance(thing, FunctionType):
            ahead += [cell.cell_contents for cell in thing.__closure__ or ()]
        elif isinstance(thing, partial):
            ahead += [thing.func, thing.args, thing.keywords]
        names = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
        names |= set(getattr(thing, "__dict__", ()))
        names |= {name for name, value in vars(type(thing)).items() if isinstance(value, property)}
        ahead += [getattr(thing, name) for name in sorted(names) if hasattr(thing, name)]
    return found


class Spying(Greedy):
    """Looks at all that it is shown, in the middle of a run."""

    def __init__(self):
        super().__init__()
        self.seen, self.kinds = 0, set()

    def look(self, *shown):
        for thing in reachable(shown):
            assert not isinstance(thing, Request), f"{thing} is in reach of a policy"
            assert not hasattr(thing, "output_length"), f"{thing} is in reach of a policy"
            self.kinds.add(type(thing).__name__)
        self.seen += 1

    def fill(self, draft):
        self.look(draft)
        for sequence in [*draft.decoding, *draft.partial, *draft.waiting]:
            draft.take(sequence, 4)
        self.look(draft)

    def place(self, request, view):
        self.look(request, view, view.loads[0], view.prefix_hit(0))
        return request.id % len(view.loads)

    def run_ahead(self, spec):
        return 2


def test_nothing_that_a_policy_is_shown_leads_to_an_output_length():
    spying = Spying()
    spec = Spec(blocks=40, block_size=4, ranks=2, lockstep=True, forwards_tokens=True)
    scheduler = Scheduler(spec, spying)
    for id in range(4):
        scheduler.arrive(Request(id, 0.0, 8, 9, output_length=5, hashes=(1, 2), hash_block=4), 0.0)
    (group,) = scheduler.groups
    first = scheduler.next_step(group, 1.0)
    assert first.starts, "the backend is told of requests"
    assert scheduler.next_step(group, 2.0), "planned while the first is in flight"
    assert spying.seen == 4 + 8
    assert {"Draft", "Rank", "Sequence", "RequestView", "Step", "ClusterView"} <= spying.kinds, "the walk went far"


def test_a_view_of_a_request_has_no_output_length():
    assert "output_length" not in {field.name for field in fields(RequestView)}


@pytest.mark.parametrize("path", sorted(Path(policies.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_policy_names_requests_or_lengths(path):
    """Nor anything that has them: policies work on views and sequences."""
    tree = ast.parse(path.read_text())
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not named & {"Request", "Scheduler", "output_length", "_lengths", "__self__", "gc"}


# --- what policies decide


class Decisions(list):
    """What was planned until the first answer ended, however it was found out."""

    over = False

    def launched(self, step, group):
        if not self.over:
            self.append((step.planned, step.columns, step.copies))

    def committed(self, done, step):
        self.over |= bool(done.ended)

    def happened(self, event):
        if not self.over:
            self.append(event)

    def arrived(self, request): ...
    def looked(self, now, commits): ...
    def waits(self): ...
    def ended(self, ended): ...


def decided(scenario: Scenario) -> Decisions:
    return serve_under(lambda scheduler: Decisions(), scenario)


@settings(max_examples=2 * settings.default.max_examples)
@given(scenarios())
def test_until_an_answer_ends_its_length_changes_nothing(scenario):
    wild = Random(len(scenario.requests))
    other = scenario.but(
        requests=tuple(replace(one, output_length=wild.randint(1, one.max_tokens)) for one in scenario.requests)
    )
    one, two = decided(scenario), decided(other)
    common = min(len(one), len(two))
    assert one[:common] == two[:common]


@dataclass(frozen=True)
class Clairvoyant:
    """A composition that the last test must find out."""

    run_ahead: int = 1

    def policy(self):
        return Composed(ChunkedPrefill(), order=Sjf(OracleLength()))


def clairvoyant(*outputs: int) -> Scenario:
    requests = tuple(Request(id, 0.0, 8, 20, output_length=length) for id, length in enumerate(outputs))
    return Scenario(Spec(blocks=20, block_size=4, max_seqs=1), requests, Clairvoyant())


def test_an_oracle_knows_and_is_found_out():
    # The second answer is the shorter one; clients allow both the same.
    assert decided(clairvoyant(9, 3))[0][1].sequence == (1,)
    assert decided(clairvoyant(3, 9))[0][1].sequence == (0,)
    simulate(clairvoyant(9, 3, 5))


# --- oracles


def test_a_scheduler_finds_oracles_however_deep_each_once():
    oracle = OracleLength()
    order = Sjf(LogNormal(of=Saturating(of=oracle)))

    class Wrapped:
        def __init__(self, inner):
            self.inner, self.again, self.many = inner, oracle, [{"one": OracleLength()}]

    assert oracles(Composed(ChunkedPrefill(), order=order)) == (oracle,)
    found = oracles(Wrapped(Composed(ChunkedPrefill(), order=order)))
    assert len(found) == 2 and any(one is oracle for one in found)
    assert oracles(Composed(ChunkedPrefill())) == ()


def test_an_oracle_says_so_in_its_name():
    with pytest.raises(TypeError, match="OracleSneaky"):

        class Sneaky(Oracle): ...


def test_an_oracle_forgets_who_ended():
    oracle = OracleLength()
    scheduler = Scheduler(Spec(blocks=20), Composed(ChunkedPrefill(), order=Sjf(oracle)))
    scheduler.arrive(Request(3, 0.0, 8, 9, output_length=5), 0.0)
    assert oracle.length(3) == 5
    scheduler.abort(3, 1.0)
    with pytest.raises(ValueError, match="OracleLength was not told of request 3"):
        oracle.length(3)


def test_a_workload_without_lengths_is_refused():
    scheduler = Scheduler(Spec(blocks=20), Composed(ChunkedPrefill(), order=Sjf(OracleLength())))
    with pytest.raises(LengthUnknown, match="OracleLength needs true output lengths, and request 3 has none") as told:
        scheduler.arrive(Request(3, 0.0, 8, 9), 0.0)
    line = tell(told.value)
    assert line.code == MEND and line.line.startswith("policy: OracleLength") and not line.details

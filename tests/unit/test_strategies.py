"""Named strategies: values, the registry, composition by phase, and the schedules themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from traced_dags import chain, tied

import piper_jax as piper
from piper_jax import AnnotationError, DirectiveError, Strategy, directive, where
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Compute, DeviceGroup
from piper_jax.planning import StrategyOptions, load_strategies, registry, strategies, strategies_text
from piper_jax.planning.registry import directives_folder, find_strategy


def rows(plan):
    """The computation of each group as a line, F and B with the microbatch."""
    dag = plan.complete()
    return {
        group: " ".join(
            f"{node.PASS}{node.MB}" for slot in slots for node in slot.nodes if isinstance(dag.nodes[node], Compute)
        )
        for group, slots in linearize(dag).items()
    }


# -- values ----------
def test_degrees_multiply_and_defaults_are_resolved():
    strategy = Strategy(data_parallel=2, pipeline_parallel=4, expert_parallel=3)
    assert strategy.num_devices == 24
    assert strategy.resolved_num_microbatches == 8
    assert Strategy().resolved_num_microbatches == 1
    assert Strategy(pipeline_parallel=4, num_microbatches=2).resolved_num_microbatches == 2


def test_a_strategy_prints_as_written():
    strategy = Strategy(pipeline_parallel=2, directives=(directive("GPipe"),))
    assert str(strategy) == "Strategy(pipeline_parallel=2, directives=(directive('GPipe'),))"


@pytest.mark.parametrize(
    "degrees", [{"data_parallel": 0}, {"pipeline_parallel": 1.5}, {"zero_stage": 4}, {"num_microbatches": 0}]
)
def test_degrees_are_counts(degrees):
    with pytest.raises(DirectiveError):
        Strategy(**degrees)


def test_options_give_groups_with_all_axes():
    options = StrategyOptions.of(Strategy(data_parallel=2, pipeline_parallel=2, tensor_parallel=2), {"depth": 3})
    assert options.group(1) == DeviceGroup(
        name="g1", devices=(4, 5, 6, 7), axes=(("data", 2), ("expert", 1), ("tensor", 2))
    )
    assert options["depth"] == 3
    assert options.get("width", 7) == 7
    with pytest.raises(DirectiveError, match="no pipeline rank 2"):
        options.group(2)
    with pytest.raises(DirectiveError, match="is not given"):
        options["width"]


def test_decorators_read_from_top_to_bottom():
    @directive("ZeRO-1")
    @directive("GPipe", option=1)
    class Model:
        __piper_degrees__ = {"pipeline_parallel": 2, "zero_stage": 1}

    class Derived(Model):
        pass

    expected = Strategy(
        pipeline_parallel=2, zero_stage=1, directives=(directive("ZeRO-1"), directive("GPipe", option=1))
    )
    assert Strategy.of(Model) == Strategy.of(Model()) == Strategy.of(Derived) == expected
    assert Strategy.of(object) == Strategy()


def test_an_unknown_degree_is_named():
    class Model:
        __piper_degrees__ = {"pipeline_paralel": 2}

    with pytest.raises(AnnotationError, match="did you mean 'pipeline_parallel'"):
        Strategy.of(Model)


# -- registry ----------
def test_the_strategies_of_the_source_tree_are_found():
    assert {"1F1B", "GPipe", "ZeRO-1", "ZeRO-2", "ZeRO-3"} <= set(strategies())


def test_strategy_files_use_only_public_names():
    folder = directives_folder()
    assert folder is not None
    for path in folder.glob("*.py"):
        imports = [line for line in path.read_text().splitlines() if line.startswith(("import", "from"))]
        for line in imports:
            assert line.startswith(("import piper_jax as piper", "from piper_jax import ")) or "piper" not in line


@pytest.mark.parametrize(
    ("file", "lines"), [("one_f_one_b.py", 25), ("interleaved_one_f_one_b.py", 35), ("zbv.py", 35), ("dualpipe.py", 60)]
)
def test_schedules_are_short(file, lines):
    folder = directives_folder()
    assert folder is not None
    text = (folder / file).read_text()
    code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(('"""', "#"))]
    assert len(code) <= lines


def test_users_register_their_own(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import piper_jax as piper\n"
        "@piper.strategy('OneGroup', options={'depth': 'ignored'})\n"
        "def one_group(plan, options):\n"
        "    plan = plan.cut(stages=1).split(piper.where(), num_microbatches=options.num_microbatches)\n"
        "    return plan.place(piper.where(), group=options.group(0))\n"
    )
    load_strategies(file)
    plan = chain(2).apply(Strategy(directives=(directive("OneGroup", depth=2),), num_microbatches=2))
    assert rows(plan) == {"g0": "F0 F1 B0 B1"}
    other = tmp_path / "other.py"
    other.write_text(file.read_text())
    with pytest.raises(DirectiveError, match="registered twice"):
        load_strategies(other)


def test_a_strategy_file_that_fails_says_so(tmp_path: Path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(DirectiveError, match="ZeroDivisionError"):
        load_strategies(tmp_path / "bad.py")
    with pytest.raises(DirectiveError, match="there is no file"):
        load_strategies(tmp_path / "none.py")


def test_the_documentation_lists_every_strategy_with_its_options():
    own = [known for known in strategies().values() if Path(known.file).parent == directives_folder()]
    assert strategies_text(own) in (Path(__file__).resolve().parents[2] / "docs" / "strategies.md").read_text()


BOOM = """import piper_jax as piper

def third(values):
    return values[3]

@piper.strategy("Boom")
def boom(plan, options):
    return third([1, 2])
"""


def test_a_fault_in_a_strategy_names_its_line(tmp_path: Path):
    (tmp_path / "boom.py").write_text(BOOM)
    load_strategies(tmp_path / "boom.py")
    with pytest.raises(DirectiveError) as caught:
        chain(2).apply(Strategy(directives=(directive("Boom"),)))
    assert str(caught.value) == (
        "strategy Boom fails at boom.py:4: IndexError: list index out of range\n"
        "help: correct boom.py; a strategy is a function of (plan, options)."
    )
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_strategy_of_other_arguments_names_its_line(tmp_path: Path):
    (tmp_path / "alone.py").write_text("import piper_jax as piper\n\n@piper.strategy('Alone')\ndef alone(plan): ...\n")
    load_strategies(tmp_path / "alone.py")
    with pytest.raises(DirectiveError, match=r"strategy Alone fails at alone\.py:3: TypeError: alone\(\) takes 1"):
        chain(2).apply(Strategy(directives=(directive("Alone"),)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("\n1 / 0\n", "bad.py:2: ZeroDivisionError: division by zero"),
        ("\n\ndef f(:\n", "bad.py:3: SyntaxError: invalid syntax (bad.py, line 3)"),
        ("import nowhere_to_be_found\n", "bad.py:1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("import piper_jax\npiper_jax.where(PP=-1)\n", "bad.py:2: FilterError: where(PP=-1): -1 is not a coordinate."),
    ],
)
def test_a_strategy_file_that_fails_names_its_line(tmp_path: Path, text, fault):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(DirectiveError) as caught:
        load_strategies(tmp_path / "bad.py")
    assert str(caught.value) == f"{tmp_path / 'bad.py'} fails at {fault}\nhelp: correct the file."


SUCH = 'help: such as @piper.strategy("Mine").'


def mine(plan, options):
    return plan


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda: piper.strategy(3), 'strategy(3) at LINE: a name is a string.\nhelp: such as @piper.strategy("Mine").'),
        (lambda: piper.strategy(mine), '@piper.strategy at LINE has no name.\nhelp: write @piper.strategy("mine").'),
        (
            lambda: piper.strategy(" "),
            "strategy(' ') at LINE: a name is one line of printable text.\nhelp: such as @piper.strategy(\"Mine\").",
        ),
        (
            lambda: piper.strategy("a\nb"),
            "strategy('a\\nb') at LINE: a name is one line of printable text.\n" + SUCH,
        ),
        (
            lambda: piper.strategy("Mine")(5),
            "strategy('Mine') at LINE: 5 is no function.\nhelp: put it above a def of (plan, options).",
        ),
    ],
)
def test_a_strategy_has_a_name_and_a_function(register, message):
    with pytest.raises(DirectiveError) as caught:
        register()
    assert re.sub(r"test_strategies\.py:\d+", "LINE", str(caught.value)) == message


# -- schedules ----------
def test_1f1b_alternates_after_its_warm_up():
    plan = chain(3).apply(Strategy(pipeline_parallel=3, num_microbatches=4))
    assert rows(plan) == {
        "g0": "F0 F1 F2 B0 F3 B1 B2 B3",
        "g1": "F0 F1 B0 F2 B1 F3 B2 B3",
        "g2": "F0 B0 F1 B1 F2 B2 F3 B3",
    }


def test_gpipe_runs_all_forwards_first():
    plan = chain(2).apply(Strategy(pipeline_parallel=2, num_microbatches=2, directives=(directive("GPipe"),)))
    assert rows(plan) == {"g0": "F0 F1 B0 B1", "g1": "F0 F1 B0 B1"}


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (4, 1), (4, 2), (2, 8), (5, 4)])
def test_any_counts_are_legal(name, stages, microbatches):
    strategy = Strategy(pipeline_parallel=stages, num_microbatches=microbatches, directives=(directive(name),))
    plan = tied(7).apply(strategy).check()
    assert plan.num_stages == stages
    assert all(len(row.split()) == 2 * microbatches for row in rows(plan).values())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_zero_composes_with_pipelines(zero_stage, data_parallel):
    strategy = Strategy(pipeline_parallel=2, data_parallel=data_parallel, zero_stage=zero_stage)
    tied(4).apply(strategy).check()


# -- composition ----------
def test_the_text_order_of_directives_does_not_change_the_meaning():
    one = Strategy(pipeline_parallel=2, data_parallel=2, directives=(directive("ZeRO-1"), directive("GPipe")))
    other = Strategy(pipeline_parallel=2, data_parallel=2, zero_stage=1, directives=(directive("GPipe"),))
    assert chain(2).apply(one) == chain(2).apply(other)


def test_plain_replication_is_added_where_there_are_replicas():
    plan = chain(1).apply(Strategy(data_parallel=2))
    assert str(plan.history[-1]) == "replicate(where(), axes=('data', 'expert'))"
    assert [record.name for record in chain(1).apply(Strategy()).history] == ["cut", "split", "place", "order"]


def test_zero_options_reach_the_buckets():
    strategy = Strategy(
        data_parallel=2,
        directives=(directive("ZeRO-3", gather_distance=2, communication_overlap=True, bucket_bytes=64),),
    )
    replication = chain(1).apply(strategy).dag.buckets["layers.0"].replication
    assert replication is not None
    assert (replication.gather_distance, replication.bucket_bytes) == (2, 64)
    assert (replication.reduce_stream, replication.gather_stream) == ("reduce", "gather")


def test_a_strategy_after_directives_of_its_own_phase_is_refused():
    plan = chain(2).split(where(), num_microbatches=2)
    with pytest.raises(DirectiveError, match="cut comes before split"):
        plan.apply(Strategy(pipeline_parallel=2))


def test_what_is_not_a_strategy_is_refused():
    with pytest.raises(DirectiveError, match="is not a strategy"):
        chain(1).apply("1F1B")
    with pytest.raises(DirectiveError, match="is not a directive"):
        Strategy(directives=("1F1B",))
    assert piper.Strategy is Strategy


def test_a_cell_of_a_notebook_registers_its_strategy_anew():
    text = "@piper.strategy('Cell')\ndef cell(plan, options):\n    return plan\n"
    for name in ("ipykernel_1/1.py", "ipykernel_1/2.py"):
        exec(compile(text, name, "exec"), {"piper": piper})
    assert find_strategy("Cell").file == "ipykernel_1/2.py"
    registry._registered.pop("Cell")


def test_suggestions_know_no_case():
    with pytest.raises(DirectiveError, match="did you mean 'DualPipeV'"):
        find_strategy("dualpipev")


def test_a_schedule_that_places_nothing_is_named():
    @piper.strategy("Unfinished")
    def unfinished(plan, options):
        return plan.split(where(), num_microbatches=2)

    with pytest.raises(DirectiveError, match=r"strategy Unfinished at test_strategies.py:\d+ left F\["):
        chain(2).apply(Strategy(pipeline_parallel=2, directives=(directive("Unfinished"),)))
    registry._registered.pop("Unfinished")

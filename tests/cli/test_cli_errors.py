"""A user's mistake on the command line: the message alone, and the right exit code, before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from traced_dags import chain
from typer.testing import CliRunner, Result

from piper_jax import Strategy
from piper_jax.cli.boundary import exit_code
from piper_jax.cli.main import app
from piper_jax.errors import MAX_LINES, ConfigError, PlanError

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "gpt_tiny.yaml")


def piper(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("command", ["train", "plan", "check", "config"])
@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.stepz=2", "unknown key 'train.stepz'.\nhelp: did you mean 'steps'?"),
        ("train.steps=ten", "train.steps = 'ten': a whole number is expected."),
        ("strategy.directives=1F2B", "there is no strategy '1F2B'.\nhelp: did you mean '1F1B'?"),
    ],
)
def test_wrong_configuration_exits_with_two(command: str, override: str, part: str):
    result = piper(command, TINY, override)
    assert result.exit_code == 2
    assert part in result.stderr
    assert result.stderr.startswith("ConfigError: override")
    assert len(result.stderr.splitlines()) <= MAX_LINES
    assert not result.stdout


def test_a_missing_file_exits_with_two_and_names_the_neighbour():
    result = piper("plan", TINY.replace("tiny", "tini"))
    assert result.exit_code == 2
    assert "did you mean" in result.stderr


def test_a_strategy_file_that_is_not_there_exits_with_two():
    result = piper("plan", TINY, "--directive", "nowhere.py")
    assert result.exit_code == 2
    assert "there is no file" in result.stderr


@pytest.mark.parametrize("arguments", [("trian",), ("train",), ("train", TINY, "--stpes", "3")])
def test_wrong_usage_exits_with_two(arguments: tuple[str, ...]):
    assert piper(*arguments).exit_code == 2


def test_check_answers_one_question_at_a_time():
    result = piper("check", TINY, "--bisect", "--node", "F[PP=0,MB=0]")
    assert result.exit_code == 2
    assert result.stderr == "ConfigError: check --bisect --node: two questions.\nhelp: ask one, then the other.\n"


def test_config_prints_what_it_loads():
    result = piper("config", TINY, "optimizer.learning_rate=1e-5")
    assert result.exit_code == 0
    assert "learning_rate: 1.0e-05" in result.stdout


def _raises(error: BaseException) -> int:
    def command() -> int:
        raise error

    return exit_code(command)


def test_errors_print_their_message_alone(capsys: pytest.CaptureFixture[str]):
    assert _raises(ConfigError("a key is wrong.", help="correct it.")) == 2
    assert _raises(PlanError("a rule is broken.")) == 1
    assert capsys.readouterr().err == "ConfigError: a key is wrong.\nhelp: correct it.\nPlanError: a rule is broken.\n"


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str]):
    assert _raises(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_fault_of_piper_itself_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        _raises(ZeroDivisionError())


# -- saved plans and files to write ----------
@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    chain(4).apply(Strategy(pipeline_parallel=2, num_microbatches=4)).save(path)
    return str(path)


@pytest.mark.parametrize("command", ["train", "plan", "check", "config"])
def test_a_saved_plan_is_no_configuration(command: str, plan_file: str):
    result = piper(command, plan_file)
    assert result.exit_code == 2
    assert result.stderr == (
        f"ConfigError: {plan_file}: a saved plan has no model to plan or run.\n"
        "help: give the YAML file that it is of; piper show and piper simulate take saved plans.\n"
    )


@pytest.mark.parametrize("given", [("train.steps=3",), ("--directive", "mine.py")])
@pytest.mark.parametrize("command", ["show", "simulate"])
def test_a_saved_plan_takes_no_overrides(command: str, given: tuple[str, ...], plan_file: str):
    result = piper(command, plan_file, *given)
    assert result.exit_code == 2
    assert "changes nothing in a saved plan.\nhelp: give the YAML file that it is of, to plan anew." in result.stderr


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_the_plan_is_not_written_over(command: str, plan_file: str):
    before = Path(plan_file).read_text()
    result = piper(command, plan_file, "-o", plan_file)
    assert result.exit_code == 2
    assert result.stderr == f"ConfigError: --output {plan_file} is the file that is read.\nhelp: give another path.\n"
    assert Path(plan_file).read_text() == before


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_paths_that_cannot_be_written(command: str, plan_file: str, tmp_path: Path):
    result = piper(command, plan_file, "-o", str(tmp_path / "none" / "x.html"))
    assert result.exit_code == 2
    assert result.stderr == (
        f"ConfigError: --output {tmp_path}/none/x.html: there is no folder {tmp_path}/none.\n"
        f"help: make it first: mkdir -p {tmp_path}/none.\n"
    )
    (tmp_path / "folder.html").mkdir()
    result = piper(command, plan_file, "-o", str(tmp_path / "folder.html"))
    assert result.exit_code == 2
    assert result.stderr == (
        f"ConfigError: cannot write {tmp_path}/folder.html: Is a directory.\n"
        "help: give the path of a file that may be written.\n"
    )


def test_unit_costs_and_hardware_contradict_each_other(plan_file: str):
    result = piper("simulate", plan_file, "--costs", "unit", "--hardware", "h100")
    assert result.exit_code == 2
    assert result.stderr == ("ConfigError: costs unit have no use for hardware h100.\nhelp: leave one of them out.\n")


@pytest.mark.parametrize("name", ["x.SVG", "x.Html", "x.JSON", "x.TXT"])
def test_suffixes_in_any_case(name: str, plan_file: str, tmp_path: Path):
    upper = tmp_path / "PLAN.JSON"
    upper.write_text(Path(plan_file).read_text())
    assert piper("show", str(upper), "-o", str(tmp_path / name)).exit_code == 0
    assert (tmp_path / name).stat().st_size > 100


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (
            "    return [][0]",
            1,
            "DirectiveError: strategy Broken fails at broken.py:4: IndexError: list index out of range",
        ),
        ("    return (", 2, "fails at broken.py:4: SyntaxError"),
    ],
)
def test_a_fault_in_a_strategy_file_names_its_line(body: str, code: int, message: str, tmp_path: Path):
    pytest.importorskip("jax")
    file = tmp_path / "broken.py"
    file.write_text(f"import piper_jax as piper\n@piper.strategy('Broken')\ndef broken(plan, options):\n{body}\n")
    result = piper("plan", TINY, "strategy.directives=[Broken]", "--directive", str(file))
    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 3

"""Measuring through the Engine protocol: the control is always there, rates are ratios of one run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner

from localspec.api.remote import RemoteEngine, RemoteSettings
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import Delta, Done, EngineError, Event, GenerateRequest, ModelInfo, Usage
from localspec.commands import bench as command
from localspec.matrix.bench import AS_IT_IS, BenchPlan, Cell, run_bench
from localspec.matrix.prompts import OWN, Prompt, read_prompts
from localspec.matrix.table import HEADINGS, against, best_by_workload, markdown, table
from localspec.matrix.workloads import WORKLOADS

PROMPTS = (Prompt.of("one"), Prompt.of("two"), Prompt.of("three"))
PLAN = BenchPlan({"code": PROMPTS, "chat": PROMPTS[:2]}, (("ngram", 3), ("off", 0), ("ngram", 5)), (1, 2), 40)


class Deep(ScriptedEngine):
    """Says of every answer what a drafter that never goes beyond three drafts would say."""

    def _timings(self, run: Any, prefill_s: float, decode_s: float) -> Any:
        timings = super()._timings(run, prefill_s, decode_s)
        drafted = (9, 9, 9)[: (run.request.depth or 0)] if run.request.drafter == "ngram" else ()
        return dataclasses.replace(timings, drafted_per_position=drafted, draft_steps=run.steps)


class Uncounted(ScriptedEngine):
    """A server that says neither ids nor counts."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        async for event in super().generate(request):
            if isinstance(event, Delta):
                yield dataclasses.replace(event, token_ids=())
            elif isinstance(event, Done):
                yield dataclasses.replace(event, usage=Usage(0, 0))


async def test_a_server_that_counts_nothing_is_not_called_slow() -> None:
    engine = Uncounted(Script(replies=(Reply("words that nobody counts"),)))
    with pytest.raises(EngineError, match="says neither token ids nor counts"):
        await run_bench(engine, PLAN, lambda cell: None)


async def test_every_combination_with_its_control_first() -> None:
    asked: list[tuple[str | None, int | None]] = []

    def choose(request: GenerateRequest, number: int) -> Reply:
        asked.append((request.drafter, request.depth))
        assert request.private and request.client == "bench"
        return Reply("The answer is the same whoever drafts." if request.drafter == "off" else "The answer differs.")

    done: list[Cell] = []
    cells = await run_bench(Deep(Script(seed=3), choose), PLAN, done.append)
    assert done == cells
    assert [(c.workload, c.active, c.drafter, c.depth) for c in cells] == [
        (workload, active, drafter, depth)
        for workload in ("code", "chat")
        for active in (1, 2)
        for drafter, depth in (("off", 0), ("ngram", 3), ("ngram", 5))
    ]
    assert asked[0] == ("off", None) and ("ngram", 5) in asked
    for cell in cells:
        assert cell.prompts == len(PLAN.workloads[cell.workload]) and cell.tokens > 0 and cell.tok_per_s > 0
        assert (cell.speedup is None) == (cell.drafter == "off")
        assert (cell.differs_from_off == 0) == (cell.drafter == "off")
        assert len(cell.per_position) <= 6 and all(0 <= share <= 1 for share in cell.per_position)


async def test_a_drafter_is_not_measured_beyond_where_it_goes() -> None:
    plan = dataclasses.replace(PLAN, methods=(("ngram", 3), ("ngram", 5), ("ngram", 9)), active=(1,))
    cells = await run_bench(Deep(), plan, lambda cell: None)
    assert [c.depth for c in cells if c.workload == "code"] == [0, 3, 5], "5 drafted three at most"


COUNTERS = """vllm:spec_decode_num_drafts_total {drafts}
vllm:spec_decode_num_draft_tokens_total {drafted}
vllm:spec_decode_num_accepted_tokens_total {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {second}
"""


class OtherServer:
    """An OpenAI server that knows nothing of drafters: seven tokens an answer, three steps, two drafts a step."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "big"}]})
        if request.url.path == "/metrics":
            n = len(self.bodies)
            text = COUNTERS.format(drafts=3 * n, drafted=6 * n, accepted=4 * n, first=3 * n, second=n)
            return httpx.Response(200, text=text)
        if request.url.path != "/v1/chat/completions":
            return httpx.Response(404)
        self.bodies.append(json.loads(request.content))
        chunks: list[Any] = [{"choices": [{"delta": {"content": word}}]} for word in ("a ", "b ", "c")]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": USAGE}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return httpx.Response(200, text="".join(lines), headers={"content-type": "text/event-stream"})


USAGE = {"prompt_tokens": 3, "completion_tokens": 7}


async def test_any_server_is_measured_as_it_is() -> None:
    server = OtherServer()
    engine = RemoteEngine(RemoteSettings("http://other/v1", poll_s=0.01), httpx.MockTransport(server))
    try:
        [cell] = await run_bench(engine, dataclasses.replace(PLAN, workloads={"code": PROMPTS}, active=(1,)), print)
    finally:
        await engine.aclose()
    assert (cell.drafter, cell.depth, cell.tokens, cell.prompts) == (AS_IT_IS, 0, 21, 3)
    assert cell.speedup is None and cell.differs_from_off is None
    assert [body["messages"][0]["content"] for body in server.bodies] == ["Say one word.", "one", "two", "three"]
    assert not {"drafter", "localspec"} & set(server.bodies[-1])


def test_own_prompts(tmp_path: Path) -> None:
    texts = tmp_path / "mine.txt"
    texts.write_text("First\nin two lines\n---\n\n---\nSecond\n")
    assert read_prompts(texts) == {OWN: (Prompt.of("First\nin two lines"), Prompt.of("Second"))}
    lines = tmp_path / "mine.jsonl"
    both = {"workload": "w", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    lines.write_text(f'{{"prompt": "p\u2028q"}}\r\n\n{json.dumps(both)}\n')
    found = read_prompts(lines)
    assert found[OWN] == (Prompt.of("p\u2028q"),)
    assert list(found) == [OWN, "w"] and [m.role for m in found["w"][0].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": "p"}\nnonsense', "line 2"),
        ("a.jsonl", b'{"prompt": 3}', "must be text"),
        ("a.jsonl", b'{"prompt": "p", "workload": "\\u001b[2J"}', "short name"),
        ("a.jsonl", b'{"messages": [{"role": "tool", "content": "x"}]}', "role must be one of"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt", b" \n---\n", "holds no prompt"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_files_that_hold_no_prompts_are_refused_in_words(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_prompts(tmp_path / name)


def cell(**changes: Any) -> Cell:
    usual = Cell("code", "mtp", 4, 1, 4, 384, 210.04, 2.503, 3.2, 0.61, (0.917, 0.837), 0.11, 0)
    return dataclasses.replace(usual, **changes)


def test_tables() -> None:
    cells = [cell(drafter="off", depth=0, speedup=None, tok_per_s=84.0, per_position=()), cell(), cell(active=4)]
    lines = table(cells).splitlines()
    assert [line.split()[0] for line in lines] == ["workload", "code", "code", "code"]
    assert "×2.50" in lines[2] and "0.92 0.84" in lines[2] and lines[1].split()[2] == "-"
    marked = markdown([cell(workload="a|b")]).splitlines()
    assert len(marked) == 3 and marked[2].startswith("| a\\|b | mtp | 4 |")
    assert all(line.replace("\\|", "").count("|") == len(HEADINGS) + 1 for line in marked)
    assert [c.drafter for c in best_by_workload(cells)] == ["mtp", "mtp"]
    assert against(cells, {("code", 1): 105.0}) == "code, 1 active: 210.0 tok/s (mtp 4) against 105.0: ×2.00"


def test_every_workload_can_keep_four_sequences_busy() -> None:
    assert set(WORKLOADS) == {"code", "chat", "maths", "summary", "editing"}
    assert all(len(set(texts)) >= 4 for texts in WORKLOADS.values())


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def engine(options: Any) -> ScriptedEngine:
        return Deep(Script(drafters=("auto", "off", "mtp", "ngram")))

    monkeypatch.setattr(command, "_engine", engine)
    monkeypatch.setattr(command, "_floor", lambda device, size: None)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command.bench, arguments)
    assert result.exception is None or isinstance(result.exception, (SystemExit, click.ClickException)), (
        result.exception
    )
    return result.exit_code, result.stdout


@pytest.mark.usefixtures("scripted")
def test_the_command(tmp_path: Path) -> None:
    code, text = invoke("--matrix", "--json", "--workloads", "chat", "--max-tokens", "8")
    assert code == 0
    document = json.loads(text)
    found = {(c["drafter"], c["depth"], c["active"]) for c in document["cells"]}
    assert {name for name, _, _ in found} == {"off", "auto", "mtp", "ngram", "ngram+mtp"}
    assert {active for _, _, active in found} == {1, 4} and ("ngram", 2, 4) in found
    (tmp_path / "earlier.json").write_text(text)
    code, text = invoke("--markdown", "--workloads", "chat,code", "--against", str(tmp_path / "earlier.json"))
    assert code == 0 and text.startswith("| workload |") and "| ngram | 4 |" in text


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    "wrong",
    [
        ("--json", "--markdown"),
        ("--depths", "4,x"),
        ("--depths", "0"),
        ("--active", "65"),
        ("--workloads", "poems"),
        ("--drafters", "dspark"),
        ("--prompts", "nowhere.txt"),
        ("--against", "nowhere.json"),
    ],
)
def test_wrong_use(wrong: tuple[str, ...]) -> None:
    assert invoke(*wrong)[0] == 2


def test_all_drafters_of_a_model() -> None:
    info = ModelInfo("m", "m", 1, 1, drafters=("auto", "off", "mtp", "ngram", "ngram_disk"))
    assert command._all_drafters(info) == ["mtp", "ngram", "ngram_disk", "ngram+mtp", "auto"]


class Learning(ScriptedEngine):
    """Counts what its tuner has seen: one for each answer of whoever drafts."""

    def __init__(self, choose: Callable[[GenerateRequest, int], Reply]) -> None:
        super().__init__(Script(seed=3), choose)
        self.learnt: list[str] = []

    async def reset_tuner(self) -> None:
        self.learnt = []

    async def swap_tuner(self, learnt: object | None) -> object:
        before, self.learnt = self.learnt, learnt if isinstance(learnt, list) else []
        return before


async def test_methods_take_turns_and_the_tuner_learns_from_its_own_answers_only() -> None:
    asked: list[tuple[str, str]] = []
    known: list[tuple[str, ...]] = []

    def choose(request: GenerateRequest, number: int) -> Reply:
        drafter, text = str(request.drafter), str(request.messages[0].content)
        asked.append((drafter, text))
        if drafter == "auto":
            known.append(tuple(engine.learnt))
        engine.learnt.append(drafter)
        return Reply("The same.")

    engine = Learning(choose)
    plan = BenchPlan({"code": PROMPTS}, (("ngram", 3), ("auto", 0)), (1,), 8, cold=True, in_turns=True)
    cells = await run_bench(engine, plan, lambda cell: None)
    assert asked[1:] == [
        *((who, "one") for who in ("off", "ngram", "auto")),
        *((who, "two") for who in ("off", "auto", "ngram")),
        *((who, "three") for who in ("off", "ngram", "auto")),
    ]
    assert known == [(), ("auto",), ("auto", "auto")]
    assert sorted(cell.drafter for cell in cells) == ["auto", "ngram", "off"]
    assert all(cell.prompts == 3 and cell.differs_from_off == 0 for cell in cells)


async def test_a_rehearsal_counts_for_nothing() -> None:
    asked: list[tuple[str | None, int]] = []

    def choose(request: GenerateRequest, number: int) -> Reply:
        asked.append((request.drafter, len(engine.learnt)))
        engine.learnt.append("")
        return Reply("The same.")

    engine = Learning(choose)
    plan = BenchPlan({"code": PROMPTS[:1]}, (("auto", 0),), (1,), 8, cold=True, rehearsals=2)
    cells = await run_bench(engine, plan, lambda cell: None)
    assert [who for who, _ in asked[1:]] == ["off"] * 3 + ["auto"] * 3
    assert [count for who, count in asked if who == "auto"] == [0, 0, 0]
    assert [cell.prompts for cell in cells] == [1, 1]
    asked.clear()
    engine.learnt.clear()
    plan = BenchPlan({"code": PROMPTS}, (("auto", 0),), (1,), 8, cold=True, in_turns=True, rehearsals=1)
    await run_bench(engine, plan, lambda cell: None)
    # A later turn is rehearsed with what the turns before it taught.
    assert [count for who, count in asked if who == "auto"] == [0, 0, 1, 1, 2, 2]

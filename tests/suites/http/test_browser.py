"""The pages in a real browser: headless Chromium, driven with the keyboard, over a scripted engine."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.server.fake_engine import INFO, FakeEngine, app_for, planned, says, serve

from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import network_facts
from tightwire.server.config.serve import HttpOptions
from tightwire.server.ipc.engine_client import EngineState, Phase
from tightwire.server.ipc.messages import CommChoice, CommSetup, SelfTestVerdict

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; the extra 'dev' has it")
_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if _CHROMIUM is None:
    pytest.skip("there is no Chromium here; on Debian: apt install chromium", allow_module_level=True)

_PHONE, _DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 860}
_TIMEOUT_MS = 60_000  # a busy machine
_LONG = "The wire is tight. It has one strand and then another. " * 4  # within the model's context
_CONTRAST = (Path(__file__).parent / "contrast.js").read_text()

# Markdown as the page draws it: its HTML, its text, and the contents of its code blocks.
_DRAW = """async (texts) => {
    const { markdown } = await import("/web/js/markdown.js");
    const { html, render } = await import("/web/vendor/htm-preact.js");
    return texts.map((text) => {
        const place = document.createElement("div");
        render(html`<div>${markdown(text)}</div>`, place);
        const code = [...place.querySelectorAll("pre code")].map((block) => block.textContent);
        return { html: place.innerHTML, text: place.textContent, code };
    });
}"""

# Keeps the texts that are drawn on each canvas, until it is cleared.
_KEEP_TEXTS = """() => {
    window.texts = new Map();
    const { clearRect, fillText } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.clearRect = function (...args) {
        texts.set(this.canvas, []);
        clearRect.apply(this, args);
    };
    CanvasRenderingContext2D.prototype.fillText = function (...args) {
        texts.get(this.canvas)?.push(args[0]);
        fillText.apply(this, args);
    };
}"""


def _choice(algorithm: str) -> CommChoice:
    return CommChoice("o_proj", "prefill", None, algorithm, f"{algorithm} was measured")


_SETUP = CommSetup(
    transport="shared-memory",
    num_nodes=1,
    choices=[_choice("two-shot")],
    self_test=[SelfTestVerdict("two-shot", True, "1 and 2048 rows"), SelfTestVerdict("ring", False, "a wrong sum")],
    link=network_facts([PairFacts(nodes=(0, 1), round_trip_s=0.0004, jitter_s=0.00002, bytes_per_s=12.5e6)]),
    extra={"flash-int8": [_choice("flash-int8")]},
)


@dataclass
class Visit:
    """A page, its server's address, and everything wrong that the browser reported."""

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)

    def see(self, selector: str, text: str | None = None) -> Any:
        """Wait until the element is visible, with this text in it."""
        found = self.page.locator(selector, has_text=text) if text is not None else self.page.locator(selector)
        found.first.wait_for(state="visible")
        return found.first

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def say(self, text: str) -> None:
        """Type a message and send it."""
        self.see('.status[data-status="ready"]')
        self.page.focus("#message")
        self.page.keyboard.type(text)
        self.press("Enter")

    def watch(self) -> None:
        page = self.page
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: None if self._is_own(asked.url) else self.problems.append(asked.url))

    def _is_own(self, address: str) -> bool:
        return address.startswith((self.url, f"blob:{self.url}"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        arguments = [
            "--no-sandbox",
            "--disable-dev-shm-usage",
        ]  # containers have neither user namespaces nor much /dev/shm
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=arguments, timeout=_TIMEOUT_MS)
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser: Any, engine: FakeEngine) -> Open:
    engine.comm_setup = _SETUP

    @contextmanager
    def open_page(
        path: str = "/", key: str | None = None, allowed: Sequence[str] = (), script: str = "", **options: Any
    ) -> Iterator[Visit]:
        setup = engine.comm_setup
        assert setup is not None
        names = [*(choice.algorithm for choice in setup.choices[:1]), *setup.extra]
        info = planned(policies=tuple(names), allreduce=names[0]) if len(names) > 1 else INFO
        app = app_for(engine, info=info, http=HttpOptions(api_key=key))
        with serve(app) as url:
            context = browser.new_context(viewport=options.pop("viewport", _DESK), **options)
            context.set_default_timeout(_TIMEOUT_MS)
            context.add_init_script(script)
            visit = Visit(context.new_page(), url)
            visit.watch()
            visit.page.goto(url + path)
            yield visit
            context.close()
            assert not [problem for problem in visit.problems if not any(text in problem for text in allowed)]

    return open_page


def test_a_host_that_takes_no_requests_says_who_does(visit: Open, engine: FakeEngine) -> None:
    reason = "this is node 1; send requests to node 0 at 10.0.0.1"
    engine.state = EngineState(phase=Phase.READY, reason=reason)
    with visit() as v:
        v.see('.status[data-status="ready"]', reason)
        assert v.see("#message").get_attribute("placeholder") == reason
        assert v.page.is_disabled("#message")
        assert all(button.is_disabled() for button in v.page.locator(".empty button, .composer button").all())


def test_a_conversation_by_keyboard(visit: Open, engine: FakeEngine) -> None:
    engine.script = says("It is **Paris**, <b>not</b> Rome.")
    with visit() as v:
        v.see('.status[data-status="ready"]')
        v.page.keyboard.type("The capital?")  # the field has the focus from the start
        v.press("Enter")
        v.see(".reply .actions", "Regenerate")  # complete; no speed: tokens may arrive at the same moment
        v.see(".reply .facts", "tokens after a prompt of ")
        assert v.page.inner_text(".reply .text") == "It is Paris, <b>not</b> Rome."
        assert v.page.inner_text(".reply .text strong") == "Paris"
        assert "End of the answer." in v.page.text_content('[aria-live="polite"][role="log"]')

        v.page.focus(".reply summary")
        v.press("Enter")
        assert v.see(".parts").inner_text().split()[0] == "compute"
        v.press("Tab")
        assert v.page.evaluate("document.activeElement.textContent") == "Regenerate"
        v.press("Enter")
        v.see(".versions", "2 of 2")

        v.see(".question button", "Edit").focus()
        v.press("Enter")
        v.see("#edit:focus")
        v.page.keyboard.type(" And of Italy?")
        v.press("Enter")
        v.see(".question .text", "The capital? And of Italy?")
        v.see(".reply .actions", "Regenerate")
        v.page.reload()
        v.see(".reply .text", "Paris")
    assert len(engine.submitted) == 3
    assert [request.params.temperature for request in engine.submitted] == [0.2] * 3


def test_a_bar_shows_how_much_of_the_prompt_is_computed(visit: Open, engine: FakeEngine) -> None:
    engine.chunk_tokens, engine.num_cached_tokens, engine.hangs_after = 10, 5, 2
    with visit() as v:
        v.say("A question that needs several steps to read.")
        v.see(".reading .facts", "25 of ")
        facts = v.page.inner_text(".reading .facts")
        assert "(5 cached)" in facts and "8.0 tokens/s" in facts
        bar = v.page.evaluate("(({ value, max }) => [value, max])(document.querySelector('progress'))")
        assert bar == [25, len(engine.submitted[0].prompt_token_ids)]
        for scheme in ("light", "dark"):
            v.page.emulate_media(color_scheme=scheme)
            assert v.page.evaluate(_CONTRAST) == []
        v.press("Escape")
        v.see(".reply .facts", "stopped")


def test_escape_stops_an_answer_and_its_text_stays(visit: Open, engine: FakeEngine) -> None:
    engine.script, engine.token_s = says(_LONG), 0.02
    with visit() as v:
        v.say("Go on.")
        v.see(".reply .text", "The wire")
        v.press("Escape")
        v.see(".reply .facts", "stopped")
        assert 0 < len(v.page.inner_text(".reply .text")) < len(_LONG)
        v.see(".reply button", "Regenerate").focus()
        v.press("Enter")
        v.see(".composer button", "Stop").focus()
        v.press("Enter")
        v.see(".versions", "2 of 2")
        v.see("#message:focus")
    assert len(engine.cancelled) == 2


def test_a_question_is_shown_to_a_reader_who_has_scrolled_up(visit: Open, engine: FakeEngine) -> None:
    engine.script = says("One.\n\n" * 12)
    with visit(viewport={"width": 1280, "height": 400}) as v:
        v.say("First?")
        v.see(".reply button", "Regenerate")
        v.page.evaluate("document.querySelector('.log').scrollTop = 0")
        v.page.wait_for_timeout(100)  # the browser tells of scrolling with the next frame
        engine.script = says("Two.")
        v.say("Second?")
        v.see(".reply >> nth=1 >> button", "Regenerate")
        end = "(({ scrollTop, scrollHeight, clientHeight }) => scrollHeight - scrollTop - clientHeight)"
        assert v.page.evaluate(f"{end}(document.querySelector('.log'))") < 20


def test_an_answer_that_streams_is_kept_when_its_view_or_page_is_left(visit: Open, engine: FakeEngine) -> None:
    engine.script, engine.token_s = says(_LONG), 0.05
    with visit() as v:
        v.say("Go on.")
        v.see(".reply .text", "The wire")
        v.page.click("text=Compare")
        v.see(".views [aria-pressed=true]", "Compare")
        v.page.click(".views >> text=Chat")
        v.see(".question .text", "Go on.")
        v.see(".reply .text", "The wire")
        v.see(".reply .facts", "stopped")
        v.see(".reply button", "Regenerate").click()
        v.see(".reply[aria-busy=true] .text", "The wire")
        v.page.reload()
        v.see(".question .text", "Go on.")
        v.see(".versions", "2 of 2")
        v.see(".reply .text", "The wire")
        v.see(".reply .facts", "stopped")


def test_one_answer_runs_at_a_time(visit: Open, engine: FakeEngine) -> None:
    """Also when a question is edited while the answer to another one streams."""
    engine.script = says("Yes.")
    with visit() as v:
        v.say("First?")
        v.see(".reply button", "Regenerate")
        v.see(".question button", "Edit").click()
        engine.script, engine.token_s = says(_LONG), 0.05
        v.say("Second?")
        v.see(".reply[aria-busy=true] .text", "The wire")
        v.page.focus("#edit")
        v.press("Enter")
        assert v.page.is_disabled(".editing button[type=submit]")
        v.see(".composer button", "Stop").click()
        v.see(".reply .facts", "stopped")
        v.page.click(".editing >> text=Send")
        v.see(".reply[aria-busy=true] .text", "The wire")
    assert len(engine.submitted) == 3


def test_settings_are_sent_and_a_conversation_is_exported(visit: Open, engine: FakeEngine) -> None:
    with visit() as v:
        v.see('.status[data-status="ready"]')
        v.see(".settings a", "Routes of the API")
        v.page.fill("#system", "Be brief.")
        v.page.fill("#temperature", "0")
        v.page.fill("#seed", "7")
        v.see(".settings label", "Max tokens")
        v.page.select_option("#policy", "flash-int8")
        v.say("Hi")
        v.see(".reply .facts", "tokens/s")
        files = {}
        for name in ("Markdown", "JSON"):
            with v.page.expect_download() as download:
                v.page.click(f"text=Export {name}")
            files[name] = Path(download.value.path()).read_text()
    [request] = engine.submitted
    assert request.allreduce == "flash-int8" and request.params.temperature == 0 and request.params.seed == 7
    assert files["Markdown"].endswith("## System\n\nBe brief.\n\n## You\n\nHi\n\n## tiny\n\nHello, world.\n")
    exported = json.loads(files["JSON"])
    assert [message["role"] for message in exported["messages"]] == ["system", "user", "assistant"]
    assert exported["messages"][2]["tightwire"]["usage"]["completion_tokens"] == 14


def test_two_policies_answer_the_same_prompt(visit: Open, engine: FakeEngine) -> None:
    engine.script = lambda request: [*("one two three" if request.allreduce is None else "one two four").encode()]
    with visit("/#compare") as v:
        v.say("Count.")
        v.see(".comparison td", "differs from word 3 on")
        assert v.page.get_attribute("#max_tokens", "placeholder") == "64"  # a quarter of the context
        assert [mark.inner_text() for mark in v.page.locator("mark").all()] == ["three", "four"]
        assert "compute" in v.page.get_attribute(".sides .split", "aria-label")
        rows = [row.inner_text().split("\t") for row in v.page.locator(".comparison tr").all()]
        assert rows[0][1:] == ["two-shot", "flash-int8", "ratio"]
        assert [row[0].strip() for row in rows[1:6]] == ["First token", "compute", "codec", "wire", "other"]
        v.page.click("text=Run again")
        v.see(".comparison td", "differs")
    first, second, *others = engine.submitted
    assert [request.allreduce for request in (first, second, *others)] == [None, "flash-int8", "flash-int8", None]
    assert first.prompt_token_ids == second.prompt_token_ids and first.params.seed == second.params.seed
    assert len({request.cache_salt for request in engine.submitted}) == 4
    assert {request.params.max_tokens for request in engine.submitted} == {64}


def test_answers_are_shown_under_the_policies_that_gave_them(visit: Open, engine: FakeEngine) -> None:
    engine.script = says("The same.")
    engine.comm_setup = msgspec.structs.replace(
        _SETUP, extra={name: [_choice(name)] for name in ("flash-int8", "ring")}
    )
    with visit("/#compare") as v:
        v.say("Count.")
        v.see(".comparison td", "the same")
        v.page.select_option("#policy-1", "ring")
        v.see(".note", "Both answer the same prompt")
        assert v.page.locator(".comparison, .sides .text").count() == 0
        v.page.select_option("#policy-1", "flash-int8")
        v.see(".comparison th", "flash-int8")
        v.see(".sides .text", "The same.")


def test_a_prompt_in_stages_is_compared_with_one_in_tensors(visit: Open, engine: FakeEngine) -> None:
    """A hybrid server has each policy twice; the second name sums the prompt's rows too."""
    engine.script = says("The same.")
    engine.comm_setup = msgspec.structs.replace(_SETUP, extra={"two-shot/tensor": [_choice("two-shot")]})
    with visit("/#compare") as v:
        v.see(".note", "the prompt is summed by all ranks")
        v.say("Count.")
        v.see(".comparison td", "the same")
        rows = [row.inner_text().split("\t") for row in v.page.locator(".comparison tr").all()]
        assert rows[0][1:] == ["two-shot", "two-shot/tensor", "ratio"]
    assert [request.allreduce for request in engine.submitted] == [None, "two-shot/tensor"]


def test_what_the_second_answer_has_not_written_yet_is_no_difference(visit: Open, engine: FakeEngine) -> None:
    engine.script = lambda request: [*("one two three" if request.allreduce is None else "one two four").encode()]
    with visit("/#compare") as v:
        v.say("Count.")
        v.see(".comparison td", "differs from word 3 on")
        engine.token_s = 0.1
        v.page.click("text=Run again")  # flash-int8 first
        v.see(".sides section:nth-child(2) .text", "one two four")
        v.see(".sides section:nth-child(1) .text", "one")
        assert v.page.locator("mark").count() == 0
        assert "s" in v.page.locator(".sides .first b").first.inner_text()  # before the answer has ended
        v.see("mark", "three")


def test_the_charts_end_now_and_tell_the_values_under_the_pointer(visit: Open, engine: FakeEngine) -> None:
    engine.script, engine.token_s = says(_LONG), 0.02
    with visit("/dashboard") as v:
        v.see('.status[data-status="ready"]')
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        v.page.evaluate("body => void fetch('/v1/chat/completions', body)", _post(body))
        v.see(".legend", "running 1")
        v.see(".legend", "running 0")
        box = v.page.locator(".chart .u-over").nth(1).bounding_box()
        legend = ""
        for back in range(2, 40):
            v.page.mouse.move(box["x"] + box["width"] * (1 - back / 60), box["y"] + 20)
            if "running 1" in (legend := v.page.locator(".legend").first.inner_text()):
                break
        assert legend.startswith("−") and "running 1" in legend and legend.split(" s")[0][1:].isdigit()


def test_the_axis_of_a_chart_of_counts_has_whole_numbers(visit: Open, engine: FakeEngine) -> None:
    """Six sequences: uPlot's own steps would be 2.5, and the number beside that line 3."""
    engine.script, engine.token_s = says(_LONG), 0.05
    with visit("/dashboard") as v:
        v.see('.status[data-status="ready"]')
        v.page.evaluate(_KEEP_TEXTS)
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 6, "stream": True}
        v.page.evaluate("body => void fetch('/v1/chat/completions', body)", _post(body))
        v.see(".legend", "running 6")
        v.page.wait_for_function("texts.get(document.querySelector('.chart canvas'))?.includes('5')")
        drawn = v.page.evaluate("texts.get(document.querySelector('.chart canvas'))")
    assert [text for text in drawn if text.isdigit()] == ["0", "5"]


def test_the_dashboard_names_sites_commands_and_emulated_nodes(visit: Open, engine: FakeEngine) -> None:
    assert _SETUP.link is not None
    engine.comm_setup = msgspec.structs.replace(
        _SETUP,
        choices=[msgspec.structs.replace(_choice("two-shot"), reason="predicted (`tightwire tune` measures)")],
        link=msgspec.structs.replace(_SETUP.link, emulation="shared-memory"),
    )
    with visit("/dashboard") as v:
        v.see(".card td", "o_proj")
        v.see(".card td code", "tightwire tune")
        nodes = [row.inner_text().split("\t")[1] for row in v.page.locator("[aria-label=Ranks] tbody tr").all()]
    assert nodes == ["0, emulated", "1, emulated"]


def test_the_dashboard_forgets_the_model_of_a_server_that_ended(visit: Open, engine: FakeEngine) -> None:
    with visit("/dashboard", allowed=["status of 503"]) as v:
        v.see(".bar .model", "tiny")
        engine.state = EngineState(phase=Phase.LOADING, reason="weights 40%")
        v.see('.status[data-status="loading"]')
        assert v.page.inner_text(".bar .model") == ""
        engine.state = EngineState(phase=Phase.READY)
        v.see(".bar .model", "tiny")


def test_the_dashboard_says_nothing_false_without_readings(visit: Open, engine: FakeEngine) -> None:
    with visit("/dashboard", allowed=["status of 503", "ERR_FAILED"]) as v:
        v.see(".card td", "two-shot was measured")
        engine.state = EngineState(phase=Phase.DRAINING)
        v.see(".notice")
        assert v.page.inner_text(".notice") == "The server takes no requests (draining)"
        v.see(".card td", "all reduce, decode")
        v.page.route("**/*", lambda route: route.abort())
        v.see(".notice", "does not answer")
        v.see(".card .note", "Two readings of a running server are needed.")


@pytest.mark.parametrize("broken", ["window, 'sessionStorage', { get", "Storage.prototype, 'setItem', { value"])
def test_pages_work_where_the_browser_keeps_nothing(visit: Open, broken: str) -> None:
    """It blocks cookies, or the texts are longer than it keeps."""
    script = f"Object.defineProperty({broken}() {{ throw new DOMException('no', 'SecurityError'); }} }});"
    with visit(key="secret", allowed=["401"], script=script) as v:
        v.see("dialog.key")
        v.page.keyboard.type("secret")
        v.press("Enter")
        v.see(".bar .model", "tiny")
        v.page.fill("#system", "Be brief.")
        v.say("Hi")
        v.see(".reply .facts", "tokens after a prompt of ")
        v.page.click("text=Compare")
        v.see(".views [aria-pressed=true]", "Compare")
        v.page.click(".views >> text=Chat")
        v.see(".question .text", "Hi")


def test_a_code_block_can_be_copied(visit: Open, engine: FakeEngine) -> None:
    engine.script = says("So:\n```python\nfor i in x:\n    print(i)\n```\nDone.")
    with visit(permissions=["clipboard-read", "clipboard-write"]) as v:
        v.say("Code?")
        v.see(".code .head", "python")
        v.see(".code button", "Copy").click()
        v.see(".code button", "Copied")
        assert v.page.evaluate("navigator.clipboard.readText()") == "for i in x:\n    print(i)"


def test_code_blocks_end_where_markdown_ends_them(visit: Open, engine: FakeEngine) -> None:
    code = {
        "1. Run:\n   ```py\n   a*b*c\n\n     d\n   ```\n2. Done": ["a*b*c\n\n  d"],
        "````md\n```js\nx\n```\n````\nafter": ["```js\nx\n```"],
        "~~~\n```\n~~~\nafter": ["```"],
        "```\na\n```py\nb": ["a\n```py\nb"],
        "~~~ a`b\nc": ["c"],
        "~" * 20_000 + "`": [""],  # in no time
        "```" + "x" * 200_000 + "` is a line": [],
        "```x = 1``` is a line": [],
    }
    with visit() as v:
        drawn = v.page.evaluate(_DRAW, list(code))
    assert [block["code"] for block in drawn] == list(code.values())
    assert [block["text"] for block in drawn][-1] == "x = 1 is a line"
    assert '<ol start="2"' in drawn[0]["html"] and "<li>Done" in drawn[0]["html"]


def test_no_text_of_an_answer_is_lost(visit: Open) -> None:
    with visit() as v:
        drawn = v.page.evaluate(_DRAW, ["# A\rtitle", "> a\u2028quote", "- an\u2028item", "[a](https://b.c/d_(e)/f) g"])
    assert [block["text"].split() for block in drawn] == [["A", "title"], ["a", "quote"], ["an", "item"], ["a", "g"]]
    assert 'href="https://b.c/d_(e)/f"' in drawn[-1]["html"]


def test_long_numbers_of_a_list_are_not_cut_on_a_phone(visit: Open, engine: FakeEngine) -> None:
    engine.script = says("1998. The year of the wire")
    with visit(viewport=_PHONE) as v:
        v.say("When?")
        v.see(".reply .facts", "tokens/s")
        room, width = v.page.evaluate(
            """() => {
                const [list, mark] = [document.querySelector(".reply ol"), document.createElement("span")];
                mark.append("1998. ");
                list.before(mark);
                return [parseFloat(getComputedStyle(list).paddingLeft), mark.offsetWidth];
            }"""
        )
    assert room >= width > 0


def test_a_server_with_one_policy_says_how_to_start_it_with_two(visit: Open, engine: FakeEngine) -> None:
    engine.comm_setup = CommSetup(transport="shared-memory", num_nodes=1)
    with visit("/#compare") as v:
        v.see("pre", "tightwire serve --tp 2 --allreduce-extra ring,flash-int8")
        v.page.goto(f"{v.url}/dashboard")
        v.see("dl.facts dd", "tensor")


def test_errors_are_shown_in_the_servers_words(visit: Open, engine: FakeEngine) -> None:
    failed = "Failed to load resource"  # the browser's own line about a status
    with visit(allowed=[failed]) as v:
        v.page.fill("#max_tokens", "9999")
        v.say("Hi")
        v.see(".reply .problem", "9999")
        v.page.fill("#max_tokens", "")
        engine.script, engine.dies_after = says(_LONG), 5
        v.see(".reply button", "Try again").click()
        v.see(".reply .problem", "rank 1 was killed")
        v.see('.status[data-status="dead"]')


def test_the_key_is_asked_for_and_kept_in_this_tab_only(visit: Open) -> None:
    with visit(key="secret", allowed=["401"]) as v:
        v.see("dialog.key")
        v.page.keyboard.type("wrong")
        v.press("Enter")
        v.see("dialog .problem", "refuses")
        v.page.fill("#key", "secret")
        v.press("Enter")
        v.see(".bar .model", "tiny")
        assert not v.page.locator("dialog").is_visible()
        assert v.page.locator("text=Routes of the API").count() == 0  # a link sends no key
        assert v.page.evaluate("Object.values(sessionStorage).includes('secret')")
        assert v.page.evaluate("localStorage.length") == 0 and v.page.evaluate("document.cookie") == ""
        v.page.goto(f"{v.url}/dashboard")
        v.see(".card h2", "AllReduce policy")


def test_the_dashboard_shows_load_and_policies(visit: Open, engine: FakeEngine) -> None:
    engine.script, engine.token_s = says(_LONG), 0.02
    with visit("/dashboard", allowed=["status of 503"]) as v:
        v.see('.status[data-status="ready"]')
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        v.page.evaluate("body => void fetch('/v1/chat/completions', body)", _post(body))
        v.see(".tiles > div:first-child .value", "1")
        v.see(".legend", "running 1")
        v.see(".card td", "two-shot was measured")
        v.see(".card td", "wrong, never used")
        v.see(".card td", "all reduce, decode")
        v.see(".card tr", "0 to 113 MB/s400 µs20.0 µs")
        v.see(".tiles > div", "Drafted tokens right")
        v.see(".tiles > div", "20 of 30")
        v.see(".tiles > div", "2.00 a draft, 0.2500 tokens a sum")
        assert v.page.locator(".chart canvas").count() == 6
        v.page.select_option("#policy", "flash-int8")
        v.see(".card td", "flash-int8 was measured")
        engine.state = EngineState(phase=Phase.DEAD, reason="rank 1 was killed")
        v.see(".notice", "rank 1 was killed")


def _post(body: dict[str, Any]) -> dict[str, Any]:
    return {"method": "POST", "headers": {"content-type": "application/json"}, "body": json.dumps(body)}


@pytest.mark.parametrize("path", ["/", "/#compare", "/dashboard"])
def test_text_is_readable_and_fits_a_phone(visit: Open, path: str) -> None:
    with visit(path, viewport=_PHONE) as v:
        if path == "/dashboard":
            v.see(".card td", "two-shot was measured")
        else:
            v.say("Hi")
            v.see(".comparison td", "the same") if "compare" in path else v.see(".reply .facts", "tokens/s")
            v.page.click(".toggle")
            v.see("#settings")
        assert v.page.evaluate("document.documentElement.scrollWidth") == _PHONE["width"]
        for scheme in ("light", "dark"):
            v.page.emulate_media(color_scheme=scheme)
            assert v.page.evaluate(_CONTRAST) == []


def test_quantiles_are_read_from_histograms(visit: Open) -> None:
    with visit() as v:
        found = v.page.evaluate(
            """async () => {
                const { parseMetrics, histogramOf, quantile } = await import("/web/js/prometheus.js");
                const text = ["# HELP h x", 'h_bucket{le="1.0"} 2', 'h_bucket{le="2.0"} 6', 'h_bucket{le="+Inf"} 8', 'a{b="c\\\\"d"} 3'];
                const samples = parseMetrics(text.join("\\n"));
                const now = histogramOf(samples, "h");
                const shares = [0.25, 0.5, 0.99].map((share) => quantile(now, null, share));
                return [...shares, quantile(now, now, 0.5), quantile(now, { counts: [2, 2, 2] }, 0.5), samples.get("a")[0]];
            }"""
        )
    assert found == [1, 1.5, 2, None, 1.75, {"labels": {"b": 'c"d'}, "value": 3}]

"""The built pages: first as HTML text, then in Debian's chromium where it is installed.

`make book` leaves a stamp in `_build/html`; while no source is newer, these tests read that build.
Otherwise they make their own.
"""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
PAGES = [TOC["root"], *(c["file"] for part in TOC["parts"] for c in part["chapters"])]
CHAPTERS = [page for page in PAGES if page.startswith("chapters/")]
PHONE = 390  # CSS pixels: a common phone held upright

# sphinx-exercise gives every exercise of a page the same inner id.
THEIR_DUPLICATES = {"exercise-content", "solution-content"}
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER),
    reason="the pages were not opened: chromium and chromedriver are not both installed",
)


def is_built(html: Path) -> bool:
    """Whether `make book` finished there and no source changed since."""
    stamp = html / ".complete"
    if not stamp.exists():
        return False
    sources = [ROOT / "_config.yml", ROOT / "_toc.yml"]
    for folder in ("book", "chapters", "solutions"):
        sources += (ROOT / folder).rglob("*.*")
    return all(
        source.stat().st_mtime <= stamp.stat().st_mtime
        for source in sources
        if "__pycache__" not in source.parts and ".ipynb_checkpoints" not in source.parts
    )


@pytest.fixture(scope="session")
def html(tmp_path_factory) -> Path:
    """The folder of built pages."""
    built = ROOT / "_build" / "html"
    if is_built(built):
        return built
    out = tmp_path_factory.mktemp("book")
    build = subprocess.run(
        [
            *(Path(sys.executable).with_name("jupyter-book"), "build", ".", "--path-output", out),
            *("-W", "--keep-going", "-n", "--all", "-q"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return out / "_build" / "html"


class Page(HTMLParser):
    """What one page holds: ids, images, links and the files it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: list[str] = []
        self.images: list[dict] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get("id"):
            self.ids.append(attrs["id"])
        if tag == "img":
            self.images.append(attrs)
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag == "link" and "stylesheet icon preload".find(attrs.get("rel") or "?") >= 0:
            self.loads.append(attrs.get("href") or "")
        if attrs.get(LOADING.get(tag, "")):
            self.loads.append(attrs[LOADING[tag]])


def is_external(url: str) -> bool:
    return bool(urlsplit(url).netloc)


# As text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_images_have_alt_text(html, page):
    for image in Page(html / f"{page}.html").images:
        alt = (image.get("alt") or "").strip()
        assert alt, f"no alt text: {image.get('src')}"
        assert not alt.endswith((".png", ".svg")), f"the alt text is a file name: {alt}"


@pytest.mark.parametrize("page", PAGES)
def test_ids_are_unique(html, page):
    ids = Page(html / f"{page}.html").ids
    assert {i for i in ids if ids.count(i) > 1} <= THEIR_DUPLICATES


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_resolve(html, page):
    here = html / f"{page}.html"
    ids = {here: Page(here).ids}
    broken = []
    for link in Page(here).links:
        url = urlsplit(link)
        if url.scheme or url.netloc:
            continue
        target = (here.parent / unquote(url.path)).resolve() if url.path else here
        if not target.is_file():
            broken.append(link)
        elif url.fragment and target.suffix == ".html":
            if target not in ids:
                ids[target] = Page(target).ids
            if unquote(url.fragment) not in ids[target]:
                broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", [*PAGES, "search"])
def test_pages_load_nothing_from_other_hosts(html, page):
    assert not [url for url in Page(html / f"{page}.html").loads if is_external(url)]


def test_stylesheets_load_nothing_from_other_hosts(html):
    sheets = list((html / "_static").rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = "".join(sheet.read_text(encoding="utf-8").split()).replace('"', "").replace("'", "")
        for start in ("url(http", "url(//", "@importhttp", "@import//"):
            assert start not in text, f"{sheet.name} loads from another host"


def test_index_leads_to_the_introduction(html):
    assert f"{TOC['root']}.html" in (html / "index.html").read_text(encoding="utf-8")


# In a browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site(html):
    """The pages, served on this machine; gives the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=html))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Headless chromium with its console and network logs."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    flags = [
        "--headless=new",
        "--window-size=1280,900",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--no-proxy-server",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # chromium refuses to sandbox root
    for flag in flags:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def visit(browser, url):
    """Open a page and wait until its scripts and its maths are done."""
    browser.get_log("browser")  # forget what earlier pages logged
    browser.get_log("performance")
    browser.get(url)
    browser.execute_async_script(
        "const done = arguments[0];"
        "const typeset = () =>"
        "  Promise.resolve(window.MathJax?.startup?.promise).then(() => done());"
        "document.readyState === 'complete' ? typeset() : addEventListener('load', typeset);"
    )


def wait_for(browser, condition):
    """What the condition returns once it is true; TimeoutException after 20 seconds."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 20).until(condition)


def requested(browser) -> list[str]:
    """The addresses asked for since the last visit began."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    urls = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if urlsplit(url).scheme in ("http", "https", "ws", "wss")]


# What the reader sees of every formula: typeset, without an error, no TeX left in the running text.
UNTYPESET = r"""
const bad = [];
for (const math of document.querySelectorAll(".math")) {
  if (!math.querySelector("mjx-container") || math.querySelector("mjx-merror, [data-mjx-error]"))
    bad.push(math.textContent.trim().slice(0, 60));
}
const article = document.querySelector("article").cloneNode(true);
article.querySelectorAll("pre, code, script, mjx-container").forEach(e => e.remove());
bad.push(...(article.textContent.match(/\\[\[(].{0,40}|\$\$.{0,40}/g) || []));
return bad;
"""

# Elements that reach beyond the phone's edge without an ancestor that scrolls.
TOO_WIDE = """
const width = document.documentElement.clientWidth, bad = [];
for (const element of document.querySelectorAll("article *")) {
  const box = element.getBoundingClientRect();
  if (box.width === 0 || box.right <= width + 1 || element.closest("mjx-assistive-mml")) continue;
  let scrolls = false;
  for (let e = element; e && e.tagName !== "ARTICLE"; e = e.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)
        && e.getBoundingClientRect().right <= width + 1) scrolls = true;
  if (!scrolls) bad.push(element.tagName + "." + element.className + ": " + Math.round(box.right));
}
return bad.slice(0, 5);
"""


@needs_browser
@pytest.mark.parametrize("page", [*PAGES, "search"])
def test_page_opens_cleanly(browser, site, page):
    visit(browser, f"{site}/{page}.html")
    urls = requested(browser)
    assert urls, "no request was seen, so the log is not working"
    assert [url for url in urls if not url.startswith(site + "/")] == []
    errors = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert errors == []
    if page != "search":
        assert browser.execute_script(UNTYPESET) == []


@needs_browser
@pytest.mark.parametrize("page", CHAPTERS)
def test_chapter_has_maths_and_a_solution_that_opens(browser, site, page):
    visit(browser, f"{site}/{page}.html")
    assert browser.execute_script("return document.querySelectorAll('mjx-container').length") > 0
    solutions = browser.find_elements("css selector", ".solution.dropdown")
    assert solutions
    for solution in solutions:
        code = solution.find_element("css selector", "pre")
        assert not code.is_displayed(), "a solution must start closed"
        button = solution.find_element("css selector", "button.toggle-button")
        browser.execute_script(
            "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button
        )
        button.click()
        wait_for(browser, lambda _, code=code: code.is_displayed())
        assert code.text.strip()


@needs_browser
def test_search_finds_coalesced(browser, site):
    visit(browser, f"{site}/search.html?q=coalesced")
    hits = wait_for(browser, lambda b: b.find_elements("css selector", "#search-results li a"))
    assert all(hit.get_attribute("href").startswith(site) for hit in hits)


@needs_browser
@pytest.mark.parametrize("page", PAGES)
def test_page_fits_a_phone(browser, site, page):
    phone = {"width": PHONE, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        visit(browser, f"{site}/{page}.html")
        assert browser.execute_script("return innerWidth") == PHONE
        assert browser.execute_script(TOO_WIDE) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

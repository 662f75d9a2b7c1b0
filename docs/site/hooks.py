"""Hooks of MkDocs for script/docs-site. The site has the layout of the repository, so that a relative link of a page
means the same in both, and its Markdown is that of repository pages (CommonMark and tables) instead of MkDocs' own.

Pages are all Markdown files but those of .github. What they link to comes along: pictures and HTML pages as they are,
other files of the repository as pages with their text, folders as lists of their files.
"""

import posixpath
import re
import subprocess
import urllib.parse
from pathlib import Path
from xml.etree import ElementTree

import pygments
import pygments.util
from markdown import Markdown
from markdown.blockparser import BlockParser
from markdown.extensions import Extension
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename

ROOT = Path(__file__).resolve().parent.parent.parent
AS_THEY_ARE = {".html", ".ipynb", ".json", ".png", ".svg"}


# --- Markdown ---------------------------------------------------------------------------------------------------------
def highlight(text: str, language: str, _attributes: str) -> str:
    """The inside of a block of code, with the classes that the theme has colours for."""
    try:
        lexer = get_lexer_by_name(language or "text")
    except pygments.util.ClassNotFound as error:
        raise PluginError(f"a block of code has the language {language}, which Pygments does not know") from error
    return pygments.highlight(text, lexer, HtmlFormatter(nowrap=True))


def fence(_renderer: object, tokens: list[Token], index: int, _options: object, _env: object) -> str:
    code = highlight(tokens[index].content, tokens[index].info.strip(), "")
    return f'<div class="highlight"><pre><code>{code}</code></pre></div>\n'


def raw_html(_renderer: object, tokens: list[Token], index: int, _options: object, _env: object) -> str:
    text = tokens[index].content.strip()
    if text == "<br>":
        return "<br/>"
    if not re.fullmatch(r"<!--.*-->", text, re.S):
        raise PluginError(f"got the HTML {text}, expected <br>, a comment or Markdown")
    return ""


COMMONMARK = MarkdownIt("commonmark", {"xhtmlOut": True}).enable(["table", "strikethrough"])
for kind in ("fence", "code_block"):
    COMMONMARK.add_render_rule(kind, fence)
for kind in ("html_block", "html_inline"):
    COMMONMARK.add_render_rule(kind, raw_html)


class CommonMarkParser(BlockParser):
    def parseDocument(self, lines: list[str]) -> ElementTree.ElementTree:
        html = COMMONMARK.render("\n".join(lines))
        return ElementTree.ElementTree(ElementTree.fromstring(f"<div>{html}</div>"))


class CommonMark(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        for preprocessor in ("html_block", "fenced_code_block"):
            md.preprocessors.deregister(preprocessor)
        for treeprocessor in ("inline", "prettify"):
            md.treeprocessors.deregister(treeprocessor)
        md.parser = CommonMarkParser(md)


def anchor(title: str, _separator: str) -> str:
    """What repository pages make of a heading; links of docs/ are written for it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(CommonMark())
    config.mdx_configs["toc"] = {"slugify": anchor, "permalink": True}
    return config


# --- files ------------------------------------------------------------------------------------------------------------
class RepositoryFile(File):
    """A page with the text of a file or the names in a folder, at its own path."""

    def is_documentation_page(self) -> bool:
        return True

    def _get_dest_path(self, use_directory_urls: bool | None = None) -> str:
        return posixpath.join(self.src_uri, "index.html")

    @property
    def dest_uri(self) -> str:
        return self._get_dest_path()


def listed() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", ":!shared"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in set(names) if name and (ROOT / name).is_file())


def links(page: str) -> set[str]:
    """Paths in the repository that a page has links to."""
    found = set()
    for token in COMMONMARK.parse((ROOT / page).read_text()):
        for inline in token.children or []:
            link = urllib.parse.urlsplit(str(inline.attrGet("href") or inline.attrGet("src") or ""))
            if link.path and not link.scheme:
                path = urllib.parse.unquote(link.path)
                found.add(posixpath.normpath(posixpath.join(posixpath.dirname(page), path)))
    return found


def text_page(name: str) -> str:
    """Markdown that shows a file, or lists a folder."""
    hidden = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"
    if (ROOT / name).is_dir():
        inside = [file[len(name) + 1 :] for file in listed() if file.startswith(f"{name}/")]
        return f"{hidden}# {name}\n" + "".join(f"- [{file}]({posixpath.basename(name)}/{file})\n" for file in inside)
    try:
        language = get_lexer_for_filename(name).aliases[0]
    except pygments.util.ClassNotFound:
        language = "text"
    text = (ROOT / name).read_text()
    return f"{hidden}# {name}\n~~~~~~{language}\n{text}~~~~~~\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    tracked = listed()
    folders = {posixpath.dirname(name) for name in tracked}
    pages = [name for name in tracked if name.endswith(".md") and not name.startswith(".github/")]
    wanted = set(config.extra_css).union(*map(links, pages))
    for folder in sorted(wanted & folders):
        wanted.update(name for name in tracked if name.startswith(f"{folder}/"))
    site = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    for name in pages:
        site.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name in sorted(wanted.difference(pages)):
        if name in tracked and (Path(name).suffix in AS_THEY_ARE or name in config.extra_css):
            site.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
        elif name in tracked or name in folders:
            inclusion = InclusionLevel.NOT_IN_NAV
            site.append(RepositoryFile.generated(config, name, content=text_page(name), inclusion=inclusion))
    return site

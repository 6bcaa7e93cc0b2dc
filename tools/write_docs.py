#!/usr/bin/env python3
"""Writes docs/reference from the docstrings of the package, a page for each module.

The sources are parsed and never imported, so that nothing has to be built. docs/variants.md is what
tools/variants.py finds by asking `kernels`.

    python tools/write_docs.py            # write the pages
    python tools/write_docs.py --check    # exit with 1 if they would change
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import variants

REPO_DIR = Path(__file__).resolve().parent.parent
PACKAGE = REPO_DIR / "torch-ext/fuselage"
FOLDER = REPO_DIR / "docs/reference"

# The pages in their order: the module, and what it is called.
FAMILIES = {
    "norm": "RMS norms",
    "ada_norm": "Layer norm and adaptive norms",
    "group_norm": "Group norm",
    "poly_norm": "PolyNorm",
    "gate": "Activations, gates and epilogues",
    "rope": "Rotary embedding",
    "sampling": "Sampling",
    "loss": "Loss",
    "linear_loss": "Loss of a head",
    "route": "Routers",
    "quant": "Quantisation",
    "fused_quant": "Norms and activations that quantise",
    "modules": "Modules",
    "layers": "Hub layers",
    "distributed": "Many GPUs",
    "integrations.transformers": "Models of transformers",
    "integrations.diffusers": "Pipelines and models of diffusers",
}
NAMESPACES = ("distributed", "integrations.transformers", "integrations.diffusers")  # by `__all__`
CLASSES_ONLY = ("modules", "layers")  # namespaces of classes, which are called by their full name
GENERATED = "<!-- `make docs` writes this page from the docstrings. Do not edit it. -->"
SECTIONS = ("Args", "Attributes", "Returns", "Raises")
COLUMNS = 88  # of a signature

Definition = ast.FunctionDef | ast.ClassDef


@dataclass
class Module:
    """A source file, parsed, with the names of it that are public."""

    name: str
    source: str
    tree: ast.Module
    public: dict[str, Definition]

    @property
    def page(self) -> str:
        return f"{self.name}.md"


def parse(path: Path) -> tuple[str, ast.Module]:
    source = path.read_text("utf-8")
    return source, ast.parse(source)


def exported(tree: ast.Module) -> list[str]:
    """What stands in `__all__`."""
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return ast.literal_eval(value)


def definitions(tree: ast.Module) -> dict[str, Definition]:
    return {
        node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def load(name: str, names: set[str]) -> Module:
    """The module and its public names: all classes, its own `__all__`, or what is of `names`."""
    path = PACKAGE / (name.replace(".", "/") + ".py")
    source, tree = parse(path)
    own = definitions(tree)
    if name in CLASSES_ONLY:
        classes = {k: node for k, node in own.items() if isinstance(node, ast.ClassDef)}
        public = {k: node for k, node in classes.items() if not k.startswith("_")}
        return Module(name, source, tree, public)
    if name not in NAMESPACES:
        public = {k: node for k, node in own.items() if k in names}
        ordered = sorted(public, key=lambda k: isinstance(public[k], ast.ClassDef))
        return Module(name, source, tree, {k: public[k] for k in ordered})
    for node in tree.body:  # a class that the module takes from another one
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            there = definitions(parse(path.parent / f"{node.module}.py")[1])
            own |= {alias.name: there[alias.name] for alias in node.names if alias.name in there}
    return Module(name, source, tree, {k: own[k] for k in exported(tree)})


# Signatures


def parameters(arguments: ast.arguments) -> Iterator[str]:
    """Each parameter as it is written, without `self`."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(plain, defaults):
        if argument.arg != "self":
            yield _argument(argument, default)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    if default is None:
        return text
    value = re.sub(r"e-0(\d)$", r"e-\1", ast.unparse(default)).replace("'", '"')
    return f"{text} = {value}" if argument.annotation else f"{text}={value}"


def signature(name: str, function: ast.FunctionDef) -> str:
    arguments = list(parameters(function.args))
    returns = ""
    if function.returns and ast.unparse(function.returns) != "None":
        returns = f" -> {ast.unparse(function.returns)}"
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= COLUMNS:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def method(module: Module, node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """A method of a class, or of those classes of the module that it derives from."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == name:
            return member
    for base in node.bases:
        parent = module.public.get(ast.unparse(base))
        if isinstance(parent, ast.ClassDef):
            return method(module, parent, name)
    return None


def code_of(module: Module, name: str, node: Definition) -> str:
    """What is called, and how: a signature, those of a module, or the fields of a result."""
    prefix = f"{module.name}." if module.name in CLASSES_ONLY else ""
    if isinstance(node, ast.FunctionDef):
        text = signature(name, node)
    elif [ast.unparse(base) for base in node.bases] == ["NamedTuple"]:
        fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
        lines = module.source.splitlines()[fields[0].lineno - 1 : fields[-1].end_lineno]
        return "\n".join([f"class {name}(NamedTuple):", *lines])
    else:
        init, forward = (method(module, node, m) for m in ("__init__", "forward"))
        parts = [signature(prefix + name, init)] if init else []
        if module.name == "modules" and not init:
            parts = [f"{prefix}{name}()"]
        parts += [signature("forward", forward)] if forward else []
        text = "\n".join(parts)
    return "\n".join([*(f"{alias}\n" for alias in _aliases(module, text)), text])


def _aliases(module: Module, text: str) -> list[str]:
    """The module's own names for types, where the text has them."""
    assignments = [node for node in module.tree.body if isinstance(node, ast.Assign)]
    named = [(ast.unparse(node.targets[0]), ast.unparse(node)) for node in assignments]
    return [line for name, line in named if "Union[" in line and re.search(rf"\b{name}\b", text)]


# Docstrings


def sections(doc: str) -> dict[str, list[str]]:
    """The lines of a docstring by section; those before the first one are under an empty name."""
    parts: dict[str, list[str]] = {"": []}
    current = ""
    for line in doc.splitlines():
        head = re.fullmatch(r"(\w+):", line)
        if head and head.group(1) in SECTIONS:
            current = head.group(1)
            parts[current] = []
        elif re.match(r"Source: ", line):
            current = "Source"
            parts[current] = [line.removeprefix("Source: ")]
        else:
            parts[current].append(line)
    return parts


def entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """`name, name: what they are`, of the indented lines of a section."""
    text = textwrap.dedent("\n".join(lines)).strip()
    for entry in re.split(r"\n(?=\S)", text):
        names, _, what = " ".join(entry.split()).partition(": ")
        yield names, what


def paragraphs(lines: list[str]) -> Iterator[str]:
    """Markdown of the text of a docstring. What is indented is a formula or an example."""
    text = textwrap.dedent("\n".join(lines)).strip()
    blocks = re.split(r"\n(?: *\n)+", text)
    for indented, group in itertools.groupby(blocks, lambda block: block.startswith("    ")):
        if indented:
            code = textwrap.dedent("\n\n".join(group))
            yield f"```{'python' if 'fuselage.' in code else 'text'}\n{code}\n```"
        else:
            yield from filter(None, group)


class Links:
    """Links from a public name in backquotes to where it is described."""

    def __init__(self, modules: list[Module]):
        self.pages: dict[str, list[str]] = {}
        for module in modules:
            for name in module.public:
                self.pages.setdefault(name, []).append(module.page)

    def to(self, name: str, page: str, home: str) -> str:
        pages = self.pages[name]
        target = home if home in pages else pages[0]
        return f"{'' if target == page else target}#{anchor(name)}"

    def add(self, text: str, page: str, home: str, itself: str = "") -> str:
        """The text of `page`, about something that is described on the page `home`."""
        text = re.sub(r"\bdocs/([\w-]+\.md)", r"[docs/\1](../\1)", text)

        def link(found: re.Match) -> str:
            name = found.group(1).rpartition(".")[2]
            if name not in self.pages or name == itself or found.group(1) == "torch.nn." + name:
                return found.group()
            return f"[{found.group()}]({self.to(name, page, home)})"

        parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)
        return "".join(
            part if part.startswith("```") else re.sub(r"`([\w.]+)`", link, part) for part in parts
        )


def anchor(name: str) -> str:
    """Of a heading that is a name, as GitHub makes it."""
    return name.lower()


def described(name: str, module: Module, node: Definition, links: Links) -> str:
    """The section of a function or class."""
    doc = ast.get_docstring(node)
    if not doc:
        raise SystemExit(f"error: {module.name}.{name} is public and has no docstring")
    parts = sections(doc)
    blocks = [f"## `{name}`"]
    if code := code_of(module, name, node):
        blocks.append(f"```python\n{code}\n```")
    blocks += paragraphs(parts.pop(""))
    reads = [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)]
    if module.name == "layers" and reads:
        blocks.append(f"Reads {', '.join(f'`{attribute}`' for attribute in reads)}.")
    for head, lines in parts.items():
        if head in ("Args", "Attributes", "Raises"):
            title = {"Args": "Arguments"}.get(head, head)
            items = "\n".join(f"- {_names(names)}: {what}" for names, what in entries(lines))
            blocks.append(f"**{title}**\n\n{items}")
        else:
            blocks.append(f"**{head}:** " + "\n\n".join(paragraphs(lines)))
    return links.add("\n\n".join(blocks), module.page, module.page, name)


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def summary(node: Definition) -> str:
    """The first sentence of a docstring."""
    first = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", first)[0].rstrip(".:").replace("|", r"\|")


def table(module: Module, links: Links, page: str) -> str:
    rows = [
        f"| [`{name}`]({'' if page == module.page else module.page}#{anchor(name)}) "
        f"| {links.add(summary(node), page, module.page, name)} |"
        for name, node in module.public.items()
    ]
    return "\n".join(["| name | what it is |", "| --- | --- |", *rows])


def page_of(module: Module, links: Links) -> str:
    title = FAMILIES[module.name]
    intro = "\n\n".join(paragraphs((ast.get_docstring(module.tree) or "").splitlines()))
    names = table(module, links, module.page)
    parts = [GENERATED, f"# {title}", links.add(intro, module.page, module.page), names]
    parts += [described(name, module, node, links) for name, node in module.public.items()]
    return "\n\n".join(parts) + "\n"


def index(tree: ast.Module, modules: list[Module], links: Links) -> str:
    """The page that has all others."""
    doc = (ast.get_docstring(tree) or "").splitlines()
    parts = [GENERATED, "# Reference", links.add("\n\n".join(paragraphs(doc)), "README.md", "")]
    for module in modules:
        parts += [f"## [{FAMILIES[module.name]}]({module.page})", table(module, links, "README.md")]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Every page with its text."""
    _, tree = parse(PACKAGE / "__init__.py")
    modules = [load(name, set(exported(tree))) for name in FAMILIES]
    links = Links(modules)
    written = {FOLDER / "README.md": index(tree, modules, links)}
    written[FOLDER.parent / "variants.md"] = variants.page()
    return written | {FOLDER / module.page: page_of(module, links) for module in modules}


def stale() -> list[str]:
    """The pages that are not what the docstrings say."""
    wanted = pages()
    there = {*FOLDER.glob("*.md"), *FOLDER.parent.glob("variants.md")}
    changed = {path for path in wanted.keys() & there if path.read_text("utf-8") != wanted[path]}
    return sorted(str(p.relative_to(REPO_DIR)) for p in changed | (wanted.keys() ^ there))


def main(arguments: list[str]) -> int:
    """Writes the pages, or checks them."""
    if arguments == ["--check"]:
        found = stale()
        if found:
            print("error: run make docs:", *found, file=sys.stderr)
        return int(bool(found))
    if arguments:
        raise SystemExit(__doc__)
    wanted = pages()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in set(FOLDER.glob("*.md")) - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Reading DeepSpeed JSON files: by path or by the name of one of ours, with line and column on a fault."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from zerofit.check.document import Document, SyntaxFault, parse
from zerofit.spec.errors import Problem, UserError, nearest


def bundled() -> dict[str, Path]:
    """Return names of the files in ds_configs/ and where they lie."""
    return {p.stem: Path(str(p)) for p in Path(str(files("zerofit.ds_configs"))).glob("*.json")}


def find_config(name: str, where: str = "--ds-config") -> Path:
    """Return the file that `--ds-config NAME` means: a path, or the name of one in ds_configs/. Raises UserError."""
    path = Path(name)
    if path.is_file():
        return path
    known = bundled()
    if path.name == name and path.stem in known:
        return known[path.stem]
    raise UserError(
        Problem(
            kind="unknown-ds-config",
            message=f"no DeepSpeed JSON {name!r}: neither a file nor one of the bundled names",
            hint=nearest(name, known) or "known: " + ", ".join(sorted(known)),
            where=where,
        )
    )


def read_document(path: Path, where: str = "--ds-config") -> Document:
    """Parse a DeepSpeed JSON, comments tolerated. Raises UserError with line and column."""
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except SyntaxFault as fault:
        place = f"{path}:{fault.line}:{fault.column}"
        message = f"{path} does not parse as JSON at line {fault.line}, column {fault.column}: {fault.message}"
        raise UserError(Problem(kind="json-syntax", message=message, where=place)) from None
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem(kind="unreadable", message=f"cannot read {path}: {error}", where=where)
        raise UserError(problem) from None
    if not isinstance(document.config, dict):
        raise UserError(Problem(kind="json-syntax", message=f"{path} holds no JSON object", where=str(path)))
    return document

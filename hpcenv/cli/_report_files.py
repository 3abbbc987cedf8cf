"""`hpcenv report --html`, `--markdown` and `--record`: write a report into files. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcenv.cli import _render
from hpcenv.cluster import energy
from hpcenv.errors import FileUnusable
from hpcenv.records.codec import encode_record
from hpcenv.records.files import write_text
from hpcenv.reproduction import report_html, report_markdown
from hpcenv.reproduction.compare import compare_runs
from hpcenv.reproduction.measured import Measured, read_measured
from hpcenv.reproduction.report_origin import explained_lines, origin_rows
from hpcenv.reproduction.run_page import RunPage, make_page
from hpcenv.reproduction.run_record import RunRecord, record_of, with_energy
from hpcenv.reproduction.use_over_time import read_use
from hpcenv.runs.entries import Run
from hpcenv.runs.find import find_run


def write(
    run: str | None, runs: str | None, *, html: str | None, markdown: str | None, record: str | None,
    against: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write the requested files, and print their names."""
    found = find_run(_render.cwd(), run, runs=runs)
    measured = read_measured(found.folder)
    made = _with_energy(record_of(found.folder, measured), found)
    texts = {} if record is None else {record: encode_record(made)}
    if html is not None or markdown is not None:
        page = _page(found, made, measured, against, runs)
        texts |= {} if html is None else {html: report_html.render(page)}
        texts |= {} if markdown is None else {markdown: report_markdown.render(page)}
    paths = []
    for name, text in texts.items():
        path = Path(os.path.abspath(_render.cwd() / name))
        try:
            write_text(text, path)
        except OSError as error:
            raise FileUnusable(f"cannot write `{path}`", why=error.strerror) from error
        paths.append(path)
    if as_json:
        _render.success("report", {"run": made.run, "files": paths})
    for path in () if as_json else paths:
        _render.say(f"wrote {path}")


def _page(found: Run, made: RunRecord, measured: Measured, against: str | None, runs: str | None) -> RunPage:
    reference = None if against is None else find_run(_render.cwd(), against, runs=runs)
    origin = tuple(origin_rows(found.folder, made, None if reference is None else reference.folder, time.time()))
    use = read_use(found.folder, made.attempts, measured)
    if reference is None:
        return make_page(made, measured, origin=origin, use=use)
    folders = str(reference.folder.path), str(found.folder.path)
    return make_page(
        made,
        measured,
        origin=origin,
        use=use,
        explained=explained_lines(_render.cwd(), *folders, runs),
        other=read_measured(reference.folder),
        other_name=reference.manifest.run,
        comparison=compare_runs(_render.cwd(), *folders),
    )


def _with_energy(record: RunRecord, run: Run) -> RunRecord:
    """Return the record. If the run is from this cluster, add the energy from Slurm's accounting."""
    if run.submission.cluster != "slurm" or Path(run.manifest.run_folder) != run.folder.path:
        return record
    joules, source = energy.consumed(run.job_ids, os.environ)
    return with_energy(record, joules, source)

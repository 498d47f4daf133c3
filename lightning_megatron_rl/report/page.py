"""Puts a report together: one HTML file that needs nothing else."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron_rl.report.charts import (
    SECTIONS,
    Chart,
    colour,
    constants,
    distribution_charts,
    phase_charts,
    phases,
    section_charts,
)
from lightning_megatron_rl.report.checks import check_run
from lightning_megatron_rl.report.embedding import embed
from lightning_megatron_rl.report.run import Run
from lightning_megatron_rl.report.samples import Samples, find_tokenizer, read_samples, show_samples
from lightning_megatron_rl.report.series import Series
from lightning_megatron_rl.utilities.versions import __version__

GENERATOR = "lightning-megatron-rl report"
_SAMPLE_BYTES = 12_000_000  # of JSON, shared by the runs
_VALIDATION_SHARE = 0.25  # of them
_LONGEST_VALUE = 500  # characters of a setting
_MOST_SETTINGS = 2_000
_GIB = 2**30
_TILES = (  # metric, title, format
    ("reward/mean", "reward", "{:.3f}"),
    ("policy/loss", "loss", "{:.4g}"),
    ("rollout/response_len_mean", "response length", "{:.1f} tokens"),
    ("time/step_s", "seconds of a step", "{:.2f}"),
    ("perf/tokens_per_s_per_gpu", "tokens per second and GPU", "{:,.0f}"),
)


def write_page(runs: Sequence[Run]) -> str:
    """Return the report of one or several runs as HTML."""
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    read = [read_samples(run) for run in runs]
    sections, figures = _sections(runs, [kinds[0] for kinds in read])
    shown, sample_notes = _shown_samples(runs, read)
    data = {"runs": [run.name for run in runs], "figures": figures, "samples": shown}
    here = Path(__file__).parent
    page = Environment(autoescape=True, trim_blocks=True).from_string((here / "page.html").read_text())
    return page.render(
        generator=GENERATOR,
        nonce=secrets.token_urlsafe(16),  # no other script runs, wherever it comes from
        title=", ".join(run.name for run in runs),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
        css=Markup((here / "page.css").read_text()),
        script=Markup((here / "page.js").read_text()),
        plotly=Markup(get_plotlyjs()),
        data=Markup(embed(data)),
        sections=sections,
        runs=[_describe(run, number) for number, run in enumerate(runs)],
        differences=_differences(runs),
        num_samples=len(shown),
        sample_notes=sample_notes,
    )


def _sections(runs: Sequence[Run], samples: Sequence[Samples]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the sections with their charts, and the figures that these name by number."""
    left = sorted({name for run in runs for name in run.metrics})
    figures: list[Any] = []
    sections = []
    for section in SECTIONS:
        names = [name for name in left if re.search(section.pattern, name)]
        left = [name for name in left if name not in names]
        flat = constants([name for name in names if name not in section.shared], runs)
        charts: list[Chart] = section_charts(section, [name for name in names if name not in flat], runs)
        if section.name == "Reward":
            charts[1:1] = distribution_charts(samples, runs, "reward", "distribution of rewards")
        elif section.name == "Responses":
            charts[1:1] = distribution_charts(samples, runs, "num_tokens", "distribution of lengths (tokens)")
        elif section.name == "Time":
            charts[:0] = phase_charts(runs)
        if charts or flat or section.missing:
            rows = [
                {"title": chart.title, "note": chart.note, "number": len(figures) + i} for i, chart in enumerate(charts)
            ]
            figures += [json.loads(chart.figure.to_json()) for chart in charts]
            said = ", ".join(f"{name} {value:.6g}" for name, value in flat.items())
            sections.append({"name": section.name, "missing": section.missing, "charts": rows, "constant": said})
    return sections, figures


def _shown_samples(runs: Sequence[Run], read: Sequence[list[Samples]]) -> tuple[list[dict[str, Any]], list[str]]:
    shown: list[dict[str, Any]] = []
    notes = []
    for number, (run, kinds) in enumerate(zip(runs, read, strict=True)):
        if not any(kind.records or kind.notes for kind in kinds):
            continue
        tokenizer, told = find_tokenizer(run), []
        if tokenizer is None:
            told.append("The tokenizer is not here any more: tokens are shown by their numbers.")
        for kind, share in zip(kinds, (1 - _VALIDATION_SHARE, _VALIDATION_SHARE), strict=True):
            rows, left_out = show_samples(kind, number, tokenizer, int(share * _SAMPLE_BYTES / len(runs)))
            shown += rows
            told += left_out
        notes += [f"{run.name}: {note}" if len(runs) > 1 else note for note in told]
    return shown, notes


# ---- what is said of a run ------------------------------------------------------------------------------------------


def _describe(run: Run, number: int) -> dict[str, Any]:
    settings = list(flatten(run.settings).items())
    return {
        "name": run.name,
        "path": str(run.path),
        "colour": colour(number),
        "ending": run.facts.get("ending", ""),
        "tiles": _tiles(run),
        "notes": run.notes,
        "findings": check_run(run.metrics),
        "phases": _phase_rows(run),
        "idle": _idle(run),
        "plan": _plan_rows(run),
        "plan_text": (run.facts.get("memory_plan") or {}).get("text", ""),
        "table": run.facts.get("table", []),
        "versions": sorted((run.settings.get("versions") or {}).items()),
        "warnings": run.warnings,
        "settings": settings[:_MOST_SETTINGS],
        "config": run.config or "There is none.",
    }


def _tiles(run: Run) -> list[dict[str, str]]:
    planned = (run.settings.get("trainer") or {}).get("max_steps") or -1
    tiles = [{"name": "steps", "value": f"{run.num_steps:,}", "note": f"of {planned:,}" if planned > 0 else ""}]
    for metric, name, form in _TILES:
        if (series := _values(run, metric)) is not None:
            ends = np.isfinite(run.metrics[metric].values[-1])
            note = f"{'at the end' if ends else f'until step {series.steps[-1]:.0f}, then no number'}, from "
            note += form.format(series.start())
            tiles.append({"name": name, "value": form.format(series.end()), "note": note})
    for metric in sorted(run.metrics):
        if re.match(r"^val/.*(mean_at_\d+|accuracy)$", metric) and (series := _values(run, metric)) is not None:
            last, best = series.values[-1], series.values.max()
            tiles.append({"name": metric, "value": f"{last:.3f}", "note": f"last; best {best:.3f}"})
    return tiles


def _values(run: Run, metric: str) -> Series | None:
    """Return the finite values of a metric; None if it has none."""
    series = run.metrics[metric].finite() if metric in run.metrics else None
    return series if series is not None and series.values.size else None


def _phase_rows(run: Run) -> list[dict[str, str]]:
    seconds = {name: float(series.values.sum()) for name, series in phases(run).items()}
    total, steps = sum(seconds.values()), max(len(run.metrics["time/step_s"].values), 1) if seconds else 1
    rows = {**seconds, "all steps": total} if seconds else {}
    return [
        {
            "name": name,
            "seconds": f"{value:,.1f}",
            "share": f"{value / max(total, 1e-9):.1%}",
            "mean": f"{value / steps:.2f} s",
        }
        for name, value in rows.items()
    ]


def _idle(run: Run) -> str:
    names = {"trainer": "perf/trainer_idle_frac", "sampler": "perf/sampler_idle_frac"}
    found = {name: _values(run, metric) for name, metric in names.items()}
    said = [f"{name} {series.values.mean():.1%}" for name, series in found.items() if series is not None]
    return f"Idle, mean of the steps: {', '.join(said)}." if said else ""


def _plan_rows(run: Run) -> list[dict[str, str]]:
    """Return what was planned beside what was measured."""
    planned, plan = (run.settings.get("trainer") or {}).get("max_steps") or -1, run.facts.get("memory_plan")
    rows = [("steps", f"{planned:,}" if planned > 0 else "no bound", f"{run.num_steps:,}")]
    peak = _values(run, "perf/peak_mem_gb")
    measured = "not logged" if peak is None else f"{peak.values.max() * 1e9 / _GIB:.2f} GiB"
    if plan:
        rows.append(("memory of the trainer, at most", f"{plan['trainer_gib']:.2f} GiB", measured))
        said = f"{plan['needed_gib']:.2f} GiB while {plan['moment']}"
        rows.append(("memory of a GPU, trainer and sampler", said, f"{plan['free_gib']:.2f} GiB were free before"))
    else:
        why = "not recorded (RunReport records it)" if not run.facts else "nothing: memory is planned on GPUs"
        rows.append(("memory of the trainer, at most", why, measured))
    return [{"name": name, "planned": left, "measured": right} for name, left, right in rows]


def flatten(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested settings as texts by dotted names.

    Example:
        ``flatten({"model": {"lr": 0.1}}) == {"model.lr": "0.1"}``
    """
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{before}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            found[f"{before}{key}"] = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
    return found


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings that runs do not share, with each run's value."""
    settings = [flatten(run.settings) for run in runs]
    keys = sorted({key for found in settings for key in found} - {"run_id"})
    rows = [(key, [found.get(key, "–") for found in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1][:_MOST_SETTINGS]

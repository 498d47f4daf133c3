"""The charts of a report as plotly figures."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_megatron_rl.report.run import Run
from lightning_megatron_rl.report.samples import Samples
from lightning_megatron_rl.report.series import Numbers, Series, bucket_means, downsample, smooth

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#6a3d9a", "#444444")  # of runs
_PHASE_COLOURS = (*COLOURS[:6], "#e69f00", "#6a3d9a", "#7f7f7f", "#bcbd22", "#17becf", "#8c564b")
_DASHES = ("solid", "dot", "dash")  # of the metrics of one chart
_POINTS = 1_500  # of a line, shared by the runs of a report
_LEAST_POINTS = 200
_BARS = 200  # of a chart of phases
_BINS = 16  # of a distribution
_NOT_IN_STEP = ("time/step_s", "time/start_s", "time/hf_export_s")


@dataclass
class Chart:
    """A figure with its title.

    Attributes:
        title: Of the chart.
        figure: Of plotly.
        note: What is said below it.
    """

    title: str
    figure: "go.Figure"
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the report: which metrics it shows.

    Attributes:
        name: Its heading.
        pattern: Of the names of its metrics.
        together: Those that share a chart, by its title.
        missing: What is said if there is no such metric.
    """

    name: str
    pattern: str
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: str = ""

    @property
    def shared(self) -> dict[str, str]:
        """The titles of shared charts by metric."""
        return {name: title for title, members in self.together.items() for name in members}


SECTIONS = (  # a metric belongs to the first that fits
    Section(
        "Reward",
        r"^(reward|val|test|preference|reward_model)/",
        {"reward": ("reward/mean", "reward/min", "reward/max")},
        "No rewards were logged.",
    ),
    Section(
        "Responses",
        r"^rollout/(response_len_|truncated|repetition|long_prompts|refill)|episode/",
        {"response length (tokens)": ("rollout/response_len_mean", "rollout/response_len_max")},
        "No lengths of responses were logged.",
    ),
    Section(
        "Staleness",
        r"^rollout/",
        {
            "staleness of tokens (versions)": ("rollout/staleness_mean", "rollout/staleness_max"),
            "groups of the stream": ("rollout/ready", "rollout/under_way"),
        },
        "No versions of weights were logged.",
    ),
    Section(
        "Mismatch",
        r"^mismatch/",
        {"importance weights": ("mismatch/is_mean", "mismatch/is_max")},
        "Trainer and sampler were not compared.",
    ),
    Section(
        "Update",
        r"^(policy|critic)/",
        {"share of clipped tokens": ("policy/clip_frac_low", "policy/clip_frac_high")},
        "No updates were logged.",
    ),
    Section("Routing", r"^moe/", {}, "No routing was logged: a model without experts has none."),
    Section(
        "Time",
        r"^(time|perf)/",
        {"idle share of the step": ("perf/trainer_idle_frac", "perf/sampler_idle_frac")},
        "No times were logged.",
    ),
    Section("Other", r".", {}, ""),
)


def section_charts(section: Section, names: Sequence[str], runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of metrics, a chart for each but for those that share one.

    Args:
        section: Theirs.
        names: Of the metrics, sorted.
        runs: All, overlaid.
    """
    shared = section.shared
    charts: dict[str, list[str]] = {title: [] for title in section.together}
    for name in names:
        if not re.search(r"_(low|high)$", name) or not {name.rpartition("_")[0]} & set(names):
            charts.setdefault(shared.get(name, name), []).append(name)
    for title, members in section.together.items():
        charts[title].sort(key=members.index)
    return [_lines(title, members, runs) for title, members in charts.items() if members]


def constants(names: Sequence[str], runs: Sequence[Run]) -> dict[str, float]:
    """Return the metrics that have one and the same value in all steps of all runs, of two steps or more."""
    found = {}
    for name in names:
        values = np.concatenate([run.metrics[name].values for run in runs if name in run.metrics])
        if len(values) > 1 and (values == values[0]).all():
            found[name] = float(values[0])
    return found


def _lines(title: str, names: Sequence[str], runs: Sequence[Run]) -> Chart:
    """Raw values, thin, and their average of each run; the ends of intervals as an area."""
    figure = _figure()
    points, thinned = max(_LEAST_POINTS, _POINTS // len(runs)), 0
    for number, run in enumerate(runs):
        for place, name in enumerate(names):
            if (series := run.metrics.get(name)) is None or not series.finite().values.size:
                continue
            label = escape(", ".join(([run.name] if len(runs) > 1 else []) + ([name] if len(names) > 1 else [])))
            line = {"color": colour(number if len(runs) > 1 else place), "dash": _DASHES[place % len(_DASHES)]}
            low, high = (run.metrics.get(f"{name}_{end}") for end in ("low", "high"))
            if low is not None and high is not None:
                _add_area(figure, downsample(low, points), downsample(high, points), line["color"])
            raw = downsample(series, points)
            thinned = max(thinned, len(series.values) if len(raw.values) < len(series.values) else 0)
            is_short = len(series.values) <= 3
            hover = "%{y:.5g} at step %{x}<extra>" + (label or escape(name)) + "</extra>"
            figure.add_scatter(
                **_points(raw),
                mode="markers" if is_short else "lines",
                line={**line, "width": 1},
                opacity=1.0 if is_short else 0.35,
                name=label,
                legendgroup=label,
                showlegend=is_short and bool(label),
                hovertemplate=hover,
                meta="both" if is_short else "raw",
            )
            if not is_short:
                figure.add_scatter(
                    **_points(downsample(smooth(series), points)),
                    mode="lines",
                    line={**line, "width": 2},
                    name=label,
                    legendgroup=label,
                    showlegend=bool(label),
                    hovertemplate=hover.replace(" at step", ", smoothed, at step"),
                    meta="smooth",
                )
    note = f"{points:,} of {thinned:,} steps are drawn; every peak is kept." if thinned else ""
    if not figure.data:
        note = "No value is a finite number."
    return Chart(title, figure, note)


def _add_area(figure: "go.Figure", low: Series, high: Series, line: str) -> None:
    common = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "meta": "both"}
    figure.add_scatter(**_points(low), **common)
    figure.add_scatter(**_points(high), fill="tonexty", fillcolor=f"{line}22", **common)


def phase_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each run of the seconds of a step by phase."""
    charts = []
    for run in runs:
        seconds = phases(run)
        if not seconds:
            continue
        figure = _figure(barmode="stack", bargap=0)
        for number, (name, series) in enumerate(seconds.items()):
            figure.add_bar(
                **_points(bucket_means(series, _BARS)),
                name=name,
                marker={"color": _PHASE_COLOURS[number % len(_PHASE_COLOURS)], "line": {"width": 0}},
                hovertemplate="%{y:.3g} s at step %{x}<extra>" + name + "</extra>",
                meta="both",
            )
        count = len(next(iter(seconds.values())).values)
        note = f"Each bar is the mean of about {count / _BARS:.0f} steps." if count > _BARS else ""
        charts.append(Chart(_titled("seconds of a step by phase", run, runs), figure, note))
    return charts


def phases(run: Run) -> dict[str, Series]:
    """Return the seconds of each phase of the steps, the longest first, and of what belongs to none as "other"."""
    step = run.metrics.get("time/step_s")
    if step is None:
        return {}
    found: dict[str, Series] = {}
    rest = np.nan_to_num(step.values)
    for name, series in run.metrics.items():
        if name.startswith("time/") and name not in _NOT_IN_STEP:
            values = np.zeros_like(step.values)
            _, mine, theirs = np.intersect1d(step.steps, series.steps, return_indices=True)
            values[mine] = np.nan_to_num(series.values[theirs])
            rest = rest - values
            if values.any():
                found[name.removeprefix("time/").removesuffix("_s")] = Series(step.steps, values)
    ordered = dict(sorted(found.items(), key=lambda item: -float(item[1].values.sum())))
    return {**ordered, "other": Series(step.steps, np.maximum(rest, 0.0))}


def distribution_charts(samples: Sequence[Samples], runs: Sequence[Run], key: str, title: str) -> list[Chart]:
    """Return a map for each run: which share of a step's training samples had which value.

    Args:
        samples: Of each run.
        runs: The runs.
        key: Of a sample's record.
        title: Of the charts.
    """
    charts = []
    for found, run in zip(samples, runs, strict=True):
        rows = [(record["step"], float(record[key])) for record in found.records if key in record]
        values = np.array([value for _, value in rows])
        if not np.isfinite(values).any():
            continue
        labels, edges = _bins(values[np.isfinite(values)])
        steps = sorted({step for step, _ in rows})
        shares = np.zeros((len(labels), len(steps)))
        for column, step in enumerate(steps):
            mine = np.array([value for other, value in rows if other == step and np.isfinite(value)])
            shares[:, column] = np.histogram(mine, edges)[0] / max(len(mine), 1)
        figure = _figure(yaxis={"type": "category"}, xaxis={"type": "category", "title": "step", "nticks": 12})
        figure.add_heatmap(
            x=[str(step) for step in steps],
            y=labels,
            z=shares.astype("f4"),
            colorscale="Blues",
            zmin=0,
            zmax=1,
            colorbar={"title": "share", "thickness": 12, "tickformat": ".0%"},
            hovertemplate="step %{x}, %{y}: %{z:.1%}<extra></extra>",
            meta="both",
        )
        note = f"Of {len(rows):,} samples of {len(steps):,} steps, of {found.num_written:,} that were written."
        charts.append(Chart(_titled(title, run, runs), figure, note))
    return charts


def _bins(values: Numbers) -> tuple[list[str], Numbers]:
    """Return labels and edges of bins: one for each value if there are few, else of equal width."""
    distinct = np.unique(values)
    if len(distinct) <= _BINS:
        middles = (distinct[1:] + distinct[:-1]) / 2
        return [f"{value:.4g}" for value in distinct], np.array([-np.inf, *middles, np.inf])
    edges = np.linspace(distinct[0], distinct[-1], _BINS + 1)
    return [f"{low:.3g} – {high:.3g}" for low, high in pairwise(edges)], edges


def colour(number: int) -> str:
    """Return the colour of a run."""
    return COLOURS[number % len(COLOURS)]


def escape(text: str) -> str:
    """Return text that plotly does not take for its own markup."""
    return html.escape(text, quote=False)


def _titled(title: str, run: Run, runs: Sequence[Run]) -> str:
    return f"{title}: {run.name}" if len(runs) > 1 else title


def _points(series: Series) -> dict[str, Any]:
    return {"x": series.steps.astype("i4"), "y": series.values.astype("f4")}


def _figure(**layout: Any) -> "go.Figure":
    """A figure without plotly's template, which would be in the file once for each; the page has the common layout."""
    import plotly.graph_objects as go

    return go.Figure(layout={"template": go.layout.Template(), **layout})

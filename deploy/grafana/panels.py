"""The few kinds of panel that the dashboards consist of, and the frame around them.

Knows Grafana's model through grafana-foundation-sdk, and none of our metrics.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG = "tritongate"
SOURCE = "source"
"""The variable that names the data source."""

_DATA_SOURCE = model.DataSourceRef(type_val="prometheus", uid=f"${{{SOURCE}}}")
_ROW = 8
"""Height of a panel in Grafana's grid, which is 24 wide."""
_NAMES = "ABCDEFGH"
"""Of a panel's queries."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and how its series are called: text with `{{label}}` in it."""

    expr: str
    legend: str


Panel = Builder[model.Panel]


def lines(
    title: str, *queries: Query, unit: str, text: str = "", span: int = 8, stacked: bool = False
) -> Panel:
    """Return curves over time. `unit` is one of Grafana's, `s` or `reqps`."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(_DATA_SOURCE)
        .unit(unit)
        .min(0)
        .span(span)
        .height(_ROW)
        .fill_opacity(25 if stacked else 8)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
    )
    if stacked:
        panel.stacking(StackingConfig().mode(common.StackingMode.NORMAL))
    for query, name in zip(queries, _NAMES, strict=False):
        panel.with_target(_target(query, name))
    return panel


def number(title: str, query: Query, *, unit: str, text: str = "", span: int = 4) -> Panel:
    """Return the newest value, large."""
    return (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(_DATA_SOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.NONE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(query))
    )


def distribution(title: str, buckets: str, *, unit: str, text: str = "", span: int = 8) -> Panel:
    """Return a heat map; `buckets` is an expression whose series differ in `le` only."""
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(_DATA_SOURCE)
        .span(span)
        .height(_ROW)
        .calculate(calculate=False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").steps(64))
        .hide_legend()
        .with_target(_target(Query(buckets, "{{le}}")).format(PromQueryFormat.HEATMAP))
    )


def percentiles(metric: str, selector: str, by: str, *, prefix: str = "{{model}} ") -> list[Query]:
    """Return the queries of a histogram's 50th, 95th and 99th percentile."""
    buckets = per_second(f"{metric}_bucket", selector, f"le, {by}")
    return [
        Query(f"histogram_quantile({share}, {buckets})", f"{prefix}p{round(share * 100)}")
        for share in (0.5, 0.95, 0.99)
    ]


def heat(metric: str, selector: str) -> str:
    """Return the expression of a histogram's buckets, for `distribution`."""
    return per_second(f"{metric}_bucket", selector, "le")


def per_second(metric: str, selector: str, by: str = "") -> str:
    """Return the expression of a counter's increase per second, summed over all labels but `by`."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def frame(
    title: str, uid: str, text: str, model_metric: str, rows: Sequence[tuple[str, Sequence[Panel]]]
) -> model.Dashboard:
    """Return a dashboard with the variables `source` and `model`.

    Args:
        title: its name.
        uid: what links call it.
        text: what it is about.
        model_metric: the metric whose label `model` says which models there are.
        rows: each with its name.
    """
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("tritongate")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(as_dropdown=False)
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
        .with_variable(dashboard.DatasourceVariable(SOURCE).label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .query(f"label_values({model_metric}, model)")
            .datasource(_DATA_SOURCE)
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.ALPHABETICAL_ASC)
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(".*")
        )
    )
    ids = itertools.count(1)
    for name, panels in rows:
        made.with_row(dashboard.Row(name).id(next(ids)))
        for panel in panels:
            made.with_panel(_Numbered(panel, next(ids)))
    return made.build()


class _Numbered(Builder[model.Panel]):
    """A panel with the id that links to it use."""

    def __init__(self, panel: Panel, number: int) -> None:
        self._panel = panel
        self._number = number

    def build(self) -> model.Panel:
        built = self._panel.build()
        built.id_val = self._number
        return built


def _target(query: Query, name: str = _NAMES[0]) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(name).range()
    return target.expr(query.expr).legend_format(query.legend).datasource(_DATA_SOURCE)
